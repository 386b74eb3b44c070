"""The attend kernel's part of the contract: numbers, codewords, page layouts, descriptors, faults."""

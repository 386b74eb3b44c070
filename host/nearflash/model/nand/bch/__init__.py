"""BCH code over GF(2^13) that corrects 16 bit errors in a codeword."""

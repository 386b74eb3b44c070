"""The `nearflash` command."""

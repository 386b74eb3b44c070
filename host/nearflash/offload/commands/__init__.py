"""The command `nearflash generate`, in memory or by a plan."""

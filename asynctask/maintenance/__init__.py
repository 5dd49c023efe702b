"""What must happen although nobody asks: recovery, lost copies, closing, samples."""

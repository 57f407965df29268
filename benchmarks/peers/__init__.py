"""What memspan is measured against: one adapter per file."""

"""What users of a trained model get: the export's folder, its card and code, the Hub."""

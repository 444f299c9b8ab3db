"""Other tools' files, one package or module for each kind."""

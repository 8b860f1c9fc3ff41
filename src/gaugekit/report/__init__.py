"""What a verb returns, for people: tables for the terminal, and self-contained HTML pages."""

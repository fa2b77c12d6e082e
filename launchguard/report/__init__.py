"""The verdict in words: text for people, JSON for machines. Import report.text or report.json; neither needs the other."""

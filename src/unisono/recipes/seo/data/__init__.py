"""What people have: queries, pages, judgements and labels, in the forms of the field; and their tokens, kept once."""

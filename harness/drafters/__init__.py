"""Where drafts come from: one file per drafter, orthogonal to the strategies."""

"""Operations that do not come to their end: detection, evidence, root cause."""

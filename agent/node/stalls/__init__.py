"""Operations that do not complete: detection, evidence, root cause."""

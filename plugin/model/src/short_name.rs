//! Names that have to fit: what two long ones lose is not what tells them apart.

use sha2::{Digest, Sha256};

const HASH: usize = 8;

/// The beginning of `text`, which is ASCII, and a hash of `whole`, of at most `longest` characters together.
/// `text` may be `whole` as far as the name's alphabet has it.
pub fn with_hash(text: &str, longest: usize, whole: &str) -> String {
    let hash: String =
        Sha256::digest(whole)[..HASH / 2].iter().map(|byte| format!("{byte:02x}")).collect();
    let room = longest.saturating_sub(HASH + 1);
    let head =
        text.get(..room).unwrap_or(text).trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
    match head.is_empty() {
        true => hash,
        false => format!("{head}-{hash}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_begin_alike_differ_and_fit() {
        let (a, b) = (format!("{}a", "x".repeat(60)), format!("{}b", "x".repeat(60)));
        let (short, other) = (with_hash(&a, 20, &a), with_hash(&b, 20, &b));
        assert!(short.len() == 20 && short.starts_with("xxxxxxxxxxx-"), "{short}");
        assert_ne!(short, other);
        assert_eq!(with_hash("", 20, "ü").len(), 8);
        assert_eq!(with_hash("a-b", 11, "a b").len(), 10, "no hyphen before the hash's");
    }
}

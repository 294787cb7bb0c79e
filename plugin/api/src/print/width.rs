//! How many columns a text takes, and texts that take fewer.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Columns of a text on a terminal.
pub fn columns(text: &str) -> usize {
    text.width()
}

/// At least the columns that a character takes in any company: a mark that joins others counts as one.
fn most(c: char) -> usize {
    c.width().unwrap_or(1).max(1)
}

/// How many bytes the first of these characters have that fit into `width` columns together.
fn fitting(characters: impl Iterator<Item = char>, width: usize) -> usize {
    let mut left = width;
    let fits = characters.map_while(|c| {
        left = left.checked_sub(most(c))?;
        Some(c.len_utf8())
    });
    fits.sum()
}

/// The longest beginning of at most `width` columns.
pub fn head(text: &str, width: usize) -> &str {
    &text[..fitting(text.chars(), width)]
}

/// The longest end of at most `width` columns.
fn tail(text: &str, width: usize) -> &str {
    &text[text.len() - fitting(text.chars().rev(), width)..]
}

/// At most `width` columns: of a longer text the beginning and the end, because pods of one Deployment differ
/// at their ends.
pub fn shorten(text: &str, width: usize) -> String {
    if columns(text) <= width {
        return text.to_owned();
    }
    let Some(kept) = width.checked_sub(1) else { return String::new() };
    let end = kept / 2;
    format!("{}…{}", head(text, kept - end), tail(text, end))
}

/// The beginning of a longer text that fits into `width` columns, and the rest: broken between words, but not
/// within the indentation; where that does not do, within a word.
pub(super) fn broken(text: &str, width: usize) -> (&str, &str) {
    let fits = head(text, width);
    let indent = text.len() - text.trim_start_matches(' ').len();
    let ends_there = text[fits.len()..].starts_with(' ');
    let at = if ends_there { Some(fits.len()) } else { fits.rfind(' ') };
    match at.filter(|at| *at > indent) {
        Some(at) => (&text[..at], text[at..].trim_start_matches(' ')),
        None => (fits, &text[fits.len()..]),
    }
}

/// Lines of at most `width` columns, broken between words, and within those that are too long.
pub fn wrap(text: &str, width: usize) -> Vec<&str> {
    let (mut lines, mut rest) = (Vec::new(), text);
    while head(rest, width.max(4)).len() < rest.len() {
        let (line, next) = broken(rest, width.max(4));
        lines.push(line);
        rest = next;
    }
    if !rest.is_empty() || lines.is_empty() {
        lines.push(rest);
    }
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn both_ends_of_a_name_stay() {
        assert_eq!(shorten("inference-7d9c5b6f4-x2x8p", 12), "infere…x2x8p");
        assert_eq!(shorten("llm-0", 12), "llm-0");
        assert_eq!(shorten("llm-0", 0), "");
        // Characters of two columns.
        assert_eq!(shorten("模型推理服务", 7), "模…务");
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("one two three", 8), ["one two", "three"]);
        assert_eq!(wrap("abcdefghij k", 4), ["abcd", "efgh", "ij k"]);
        assert_eq!(wrap("", 8), [""]);
    }

    proptest! {
        #[test]
        fn nothing_is_wider_than_it_may_be(text in "\\PC{0,80}", width in 0usize..50) {
            prop_assert!(columns(&shorten(&text, width)) <= width);
            for line in wrap(&text, width) {
                prop_assert!(columns(line) <= width.max(4), "{line:?}");
            }
            let words: Vec<&str> = text.split_whitespace().collect();
            if width > 400 {
                prop_assert_eq!(wrap(&text, width).concat(), words.concat());
            }
        }

        #[test]
        fn wrapping_loses_nothing_but_spaces(text in "[a-z ]{0,80}", width in 4usize..50) {
            let together = wrap(&text, width).concat().replace(' ', "");
            prop_assert_eq!(together, text.replace(' ', ""));
        }
    }
}

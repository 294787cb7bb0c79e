//! A line of text as words, as a shell would have it: quotes, and `#` for the rest of the line.

/// The words of a line; none of an empty one or a comment.
///
/// # Errors
/// A quote without its end.
pub fn words(line: &str) -> Result<Vec<String>, String> {
    let mut all = Vec::new();
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    for c in line.chars() {
        match quote {
            Some(end) if c == end => quote = None,
            Some(_) => word.get_or_insert_default().push(c),
            None if c == '"' || c == '\'' => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            None if c == '#' && word.is_none() => break,
            None if c.is_whitespace() => all.extend(word.take()),
            None => word.get_or_insert_default().push(c),
        }
    }
    if let Some(quote) = quote {
        return Err(format!("a {quote} without its end"));
    }
    all.extend(word);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_as_in_a_shell() {
        assert_eq!(words("run a  --gpu 1 # one").unwrap(), ["run", "a", "--gpu", "1"]);
        assert_eq!(
            words(r#"run a -- sh -c 'echo "x y"'"#).unwrap().last().unwrap(),
            "echo \"x y\""
        );
        assert_eq!(words("a#b ''").unwrap(), ["a#b", ""]);
        assert!(words("  # nothing").unwrap().is_empty());
        assert!(words("run 'a").is_err());
    }
}

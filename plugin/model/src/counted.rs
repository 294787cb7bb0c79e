//! Counts in words.

/// How often: `once`, `twice`, `3 times`.
pub fn times(count: u64) -> String {
    match count {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        count => format!("{count} times"),
    }
}

/// How many: `1 GPU`, `2 GPUs`.
pub fn plural(count: usize, one: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") }
}

/// Of many names the first ones, and how many more there are.
pub fn first(names: impl IntoIterator<Item = String>, most: usize) -> Vec<String> {
    let mut names: Vec<String> = names.into_iter().collect();
    let more = names.len().saturating_sub(most);
    names.truncate(most);
    if more > 0 {
        names.push(format!("and {more} more"));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_and_two_are_words() {
        assert_eq!([0, 1, 2, 3].map(times), ["0 times", "once", "twice", "3 times"]);
        assert_eq!([0, 1, 2].map(|n| plural(n, "GPU")), ["0 GPUs", "1 GPU", "2 GPUs"]);
    }
}

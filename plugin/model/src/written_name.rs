//! Names as a person writes them: ids by their beginnings, and what to propose where nothing is called so.

use std::collections::BTreeSet;

use super::counted;

/// Fewest characters of a beginning.
pub const BEGINNING: usize = 4;
/// Most names that are proposed.
const PROPOSED: usize = 8;

/// What is written begins several ids.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{written}\" begins several ids; write more of it: {}", ids.join(", "))]
pub struct Several {
    pub written: String,
    /// The first of those that begin so.
    pub ids: Vec<String>,
}

impl Several {
    /// What is written begins these, which may say where each of them is.
    pub fn new(written: &str, ids: impl IntoIterator<Item = String>) -> Several {
        let ids = ids.into_iter().take(PROPOSED).collect();
        Several { written: written.to_owned(), ids }
    }
}

/// Whether an id is written so, in full or by its beginning of at least four characters.
pub fn is_written(id: &str, written: &str) -> bool {
    id == written || written.len() >= BEGINNING && id.starts_with(written)
}

/// Of all things those whose id is written so. One in full goes before what begins so.
pub fn written_so<T>(
    all: impl IntoIterator<Item = T>,
    id: impl Fn(&T) -> &str,
    written: &str,
) -> Vec<T> {
    let mut found: Vec<T> = all.into_iter().filter(|one| is_written(id(one), written)).collect();
    if found.iter().any(|one| id(one) == written) {
        found.retain(|one| id(one) == written);
    }
    found
}

/// The id that is written in full or by its beginning, of at least four characters. `None` if there is none.
pub fn by_beginning<'a>(
    ids: &BTreeSet<&'a str>,
    written: &str,
) -> Result<Option<&'a str>, Several> {
    match written_so(ids.iter().copied(), |id| id, written).as_slice() {
        [] => Ok(None),
        [id] => Ok(Some(id)),
        several => Err(Several::new(written, several.iter().map(ToString::to_string))),
    }
}

/// Of all names those with the written one's last part in them, or the first ones where there is none such. The last
/// item may be the number of further ones.
pub fn proposals(all: BTreeSet<String>, written: &str) -> Vec<String> {
    let last = written.rsplit('/').next().unwrap_or(written).to_lowercase();
    let is_alike = |name: &&String| name.to_lowercase().contains(&last);
    let alike: Vec<String> = all.iter().filter(is_alike).cloned().collect();
    counted::first(if alike.is_empty() { all.into_iter().collect() } else { alike }, PROPOSED)
}

/// The end of a sentence that says that nothing is called so.
pub fn there_is(proposals: &[String]) -> String {
    match proposals {
        [] => String::new(),
        known => format!("; there is {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_found_in_full_or_by_enough_of_its_beginning() {
        let ids = BTreeSet::from(["abcd", "abcde", "bcdef", "xy"]);
        for (written, found) in [
            ("abcd", Some("abcd")),
            ("abcde", Some("abcde")),
            ("bcde", Some("bcdef")),
            ("bcd", None),
            ("xy", Some("xy")),
            ("zzzz", None),
        ] {
            assert_eq!(by_beginning(&ids, written), Ok(found), "{written}");
        }
        let names: Vec<String> = (0..20).map(|n| format!("GPU-{n:02}")).collect();
        let ids = names.iter().map(String::as_str).collect();
        let several = by_beginning(&ids, "GPU-").unwrap_err();
        assert_eq!(several.ids, names[..PROPOSED]);
        let text = several.to_string();
        assert!(
            text.starts_with("\"GPU-\" begins several ids; write more of it: GPU-00, GPU-01, ")
        );
    }

    #[test]
    fn names_like_the_written_one_are_proposed_or_else_the_first() {
        let all: BTreeSet<String> =
            (0..20).map(|n| format!("team/chat-{n:02}")).chain(["team/Batch".into()]).collect();
        assert_eq!(proposals(all.clone(), "other/batch"), ["team/Batch"]);
        let chats = proposals(all.clone(), "chat");
        assert_eq!((chats.len(), chats[8].as_str()), (PROPOSED + 1, "and 12 more"));
        assert_eq!(proposals(all, "nothing").last().unwrap(), "and 13 more");
        assert_eq!(there_is(&chats[7..]), "; there is team/chat-07, and 12 more");
        assert_eq!(there_is(&proposals(BTreeSet::new(), "chat")), "");
    }
}

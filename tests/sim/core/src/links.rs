//! `[[nvlink]]`: which GPUs are linked, and how many links each pair has.

use serde::Deserialize;

/// `NVML_NVLINK_MAX_LINKS`.
pub const MAX_LINKS: usize = 18;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLinks {
    /// NVML indexes; each is linked to each of the others.
    pub gpus: Vec<usize>,
    /// Links of each pair.
    pub links: usize,
}

/// What is wrong with the tables, if anything.
pub(crate) fn check(tables: &[NvLinks], gpus: usize) -> Result<(), String> {
    for (i, table) in tables.iter().enumerate() {
        if let Some(gpu) = table.gpus.iter().find(|&&gpu| gpu >= gpus) {
            return Err(format!("nvlink {i}: gpus names {gpu}, but there are {gpus} GPUs"));
        }
        let mut distinct = table.gpus.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() != table.gpus.len() || distinct.len() < 2 || table.links == 0 {
            return Err(format!("nvlink {i}: two or more different gpus, and links of at least 1"));
        }
    }
    for gpu in 0..gpus {
        let count = peers(tables, gpu).count();
        if count > MAX_LINKS {
            return Err(format!("nvlink: GPU {gpu} has {count} links, at most {MAX_LINKS}"));
        }
    }
    Ok(())
}

/// The GPU at the other end of each of a GPU's links, by link.
pub fn peers(tables: &[NvLinks], gpu: usize) -> impl Iterator<Item = usize> + '_ {
    tables
        .iter()
        .filter(move |table| table.gpus.contains(&gpu))
        .flat_map(move |table| table.gpus.iter().map(|&peer| (peer, table.links)))
        .filter(move |&(peer, _)| peer != gpu)
        .flat_map(|(peer, links)| std::iter::repeat_n(peer, links))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn each_of_a_table_is_linked_to_each_other() {
        let tables =
            [NvLinks { gpus: vec![0, 1, 2], links: 2 }, NvLinks { gpus: vec![2, 3], links: 1 }];
        let peers = |gpu| peers(&tables, gpu).collect::<Vec<_>>();
        assert_eq!(peers(0), [1, 1, 2, 2]);
        assert_eq!(peers(2), [0, 0, 1, 1, 3]);
        assert_eq!(peers(3), [2]);
        assert_eq!(peers(4), []);
    }

    #[test]
    fn impossible_links_are_refused() {
        for (text, part) in [
            ("[[nvlink]]\ngpus = [0, 2]\nlinks = 1", "there are 2 GPUs"),
            ("[[nvlink]]\ngpus = [0, 0]\nlinks = 1", "two or more different"),
            ("[[nvlink]]\ngpus = [0, 1]\nlinks = 0", "at least 1"),
            ("[[nvlink]]\ngpus = [0, 1]\nlinks = 19", "at most 18"),
            ("[[nvlink]]\ngpus = [0, 1]", "links"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.0.contains(part), "{text:?} gave {error}");
        }
    }
}

//! Replica ids: `<UUID>::<n>`, a pure function of the GPU and the index, so that a restart, a lost
//! ledger and another node with the same GPU all agree on them.

use std::fmt;

/// Most replicas of one GPU: more would be smaller than a CUDA context on any GPU sold.
pub const MAX_PER_GPU: u32 = 256;

/// Longest id kubelet's checkpoint and labels carry.
pub const MAX_ID_LEN: usize = 63;

/// One unit advertised to kubelet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Replica {
    pub uuid: String,
    /// From 0.
    pub index: u32,
}

impl Replica {
    /// Reads an id back. `None` for anything [`Replica::to_string`] would not have written.
    pub fn parse(id: &str) -> Option<Self> {
        let (uuid, index) = Replica::split(id)?;
        Some(Replica { uuid: uuid.to_owned(), index })
    }

    /// As [`Replica::parse`], without a copy: UUID and index.
    pub fn split(id: &str) -> Option<(&str, u32)> {
        let (uuid, digits) = id.rsplit_once("::")?;
        // One spelling per replica: "07" or "+7" would be a second name for the same share.
        let plain = digits == "0" || digits.starts_with(|c: char| ('1'..='9').contains(&c));
        let index: u32 = digits.parse().ok().filter(|n| *n < MAX_PER_GPU)?;
        (plain && is_uuid(uuid)).then_some((uuid, index))
    }
}

impl Replica {
    /// The id of the `index`-th replica of this GPU.
    pub fn id(uuid: &str, index: u32) -> String {
        format!("{uuid}::{index}")
    }
}

/// Replicas as people read them, by GPU: `0 and 2 of GPU-49aa…`.
pub fn grouped(ids: &[String]) -> String {
    let mut gpus: Vec<(&str, Vec<String>)> = Vec::new();
    for (uuid, index) in ids.iter().filter_map(|id| Replica::split(id)) {
        match gpus.iter_mut().find(|(known, _)| *known == uuid) {
            Some((_, indexes)) => indexes.push(index.to_string()),
            None => gpus.push((uuid, vec![index.to_string()])),
        }
    }
    let of = |(uuid, indexes): (&str, Vec<String>)| format!("{} of {uuid}", indexes.join(" and "));
    gpus.into_iter().map(of).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.uuid, self.index)
    }
}

/// Whether `uuid` can be a part of a replica id: a UUID's characters, and short enough. What drivers before
/// 470.42.01 call MIG instances (`MIG-GPU-…/1/0`) can't: `/` has no place in names of devices.
pub fn is_uuid(uuid: &str) -> bool {
    let longest = MAX_ID_LEN - "::".len() - (MAX_PER_GPU - 1).to_string().len();
    !uuid.is_empty()
        && uuid.len() <= longest
        && uuid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn replicas_of_one_gpu_name_it_once() {
        let ids = ["GPU-a::0", "GPU-b::1", "GPU-a::2", "?"].map(str::to_owned);
        assert_eq!(grouped(&ids), "0 and 2 of GPU-a, 1 of GPU-b");
    }

    #[test]
    fn a_name_with_slashes_is_no_uuid() {
        assert!(is_uuid("MIG-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28"));
        assert!(!is_uuid("MIG-GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28/1/0"));
    }

    #[test]
    fn ids_read_like_nvidias() {
        let replica = Replica { uuid: "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28".into(), index: 3 };
        assert_eq!(replica.to_string(), "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28::3");
    }

    #[test]
    fn what_no_replica_is_called_is_refused() {
        for id in ["", "::", "GPU-1", "GPU-1::", "::1", "GPU-1::x", "GPU-1::-1", "GPU-1::+1"] {
            assert_eq!(Replica::parse(id), None, "{id}");
        }
        for id in ["GPU-1::01", "GPU-1::256", "GPU-1::4294967296", "GPU 1::1", "../x::1"] {
            assert_eq!(Replica::parse(id), None, "{id}");
        }
        assert_eq!(Replica::parse(&format!("{}::1", "x".repeat(80))), None);
    }

    proptest! {
        #[test]
        fn ids_survive_the_round_trip(uuid in "(GPU|MIG)-[0-9a-f-]{1,45}", index in 0..MAX_PER_GPU) {
            let replica = Replica { uuid, index };
            let id = replica.to_string();
            prop_assert!(id.len() <= MAX_ID_LEN);
            prop_assert_eq!(Replica::parse(&id), Some(replica));
        }

        #[test]
        fn no_input_panics(id in ".{0,80}") {
            let _ = Replica::parse(&id);
        }
    }
}

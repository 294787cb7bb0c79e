//! What a series is of, and its names as they are stored.

use super::wire::{Reader, put, put_text};

/// A tenant on one GPU, or a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The allocation; empty for a GPU's own.
    pub id: String,
    /// Which Allocate of this id; 0 for a GPU's own.
    pub generation: u64,
    pub gpu_uuid: String,
}

/// A series and its names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Series {
    /// What it is of.
    pub key: Key,
    /// The pod's namespace; empty where kubelet never named it.
    pub namespace: String,
    pub pod: String,
    pub container: String,
}

impl Series {
    /// It is a GPU's own.
    pub fn is_gpu(&self) -> bool {
        self.key.id.is_empty()
    }
}

/// A series in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Named {
    pub series: Series,
    /// The last second that is known to be in the file; up to an hour may have been added since.
    pub last: u32,
}

impl Named {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Series { key, namespace, pod, container } = &self.series;
        let mut out = Vec::with_capacity(128);
        put(&mut out, u64::from(self.last));
        put(&mut out, key.generation);
        for text in [&key.id, &key.gpu_uuid, namespace, pod, container] {
            put_text(&mut out, text);
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let last = u32::try_from(reader.number()?).ok()?;
        let generation = reader.number()?;
        let mut text = || reader.text().map(str::to_owned);
        let key = Key { id: text()?, generation, gpu_uuid: text()? };
        let series = Series { key, namespace: text()?, pod: text()?, container: text()? };
        Some(Named { series, last })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_stored_is_what_is_read(texts in prop::array::uniform5("\\PC{0,40}"), generation: u64, last: u32) {
            let [id, gpu_uuid, namespace, pod, container] = texts;
            let key = Key { id, generation, gpu_uuid };
            let named = Named { series: Series { key, namespace, pod, container }, last };
            prop_assert_eq!(Named::decode(&named.encode()), Some(named));
        }

        #[test]
        fn garbage_is_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Named::decode(&bytes);
        }
    }
}

//! Room for claims on a GPU: memory and time. A share needs both, so a GPU without one of them has no room, however
//! much there is of the other.

use std::fmt;

use tessera_model::record::Record;

use crate::capacity::Capacity;

/// All of a GPU's time, in thousandths.
pub const WHOLE_MILLIS: u32 = 1000;
/// The least that a scheduler counts of a GPU's time, in thousandths.
pub const LEAST_MILLIS: u32 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    pub memory_bytes: u64,
    /// Thousandths of its time.
    pub cores_millis: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    Memory,
    Time,
    Both,
}

impl Left {
    /// Beside these records, which are live. Memory counts as it is held; time as the scheduler counts it: by what was
    /// allocated, whatever it was changed to since.
    pub fn beside<'a>(
        capacity: Capacity,
        uuid: &str,
        live: impl Iterator<Item = &'a Record>,
    ) -> Self {
        let all = Left { memory_bytes: capacity.sellable(), cores_millis: WHOLE_MILLIS };
        live.fold(all, |left, record| Left {
            memory_bytes: left.memory_bytes.saturating_sub(record.counted_bytes(uuid).unwrap_or(0)),
            cores_millis: left.cores_millis.saturating_sub(allocated_millis(record, uuid)),
        })
    }

    /// What is missing for a share of this size.
    pub fn lack(self, memory_bytes: u64, cores_millis: u32) -> Option<Lack> {
        match (memory_bytes > self.memory_bytes, cores_millis > self.cores_millis) {
            (true, true) => Some(Lack::Both),
            (true, false) => Some(Lack::Memory),
            (false, true) => Some(Lack::Time),
            (false, false) => None,
        }
    }

    /// What is missing for any share at all: one in which a context fits, with some of the GPU's time.
    pub fn lack_of_any(self, context_bytes: u64) -> Option<Lack> {
        self.lack(context_bytes.saturating_add(1), LEAST_MILLIS)
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Lack::Memory => "memory",
            Lack::Time => "GPU time",
            Lack::Both => "memory and GPU time",
        })
    }
}

fn allocated_millis(record: &Record, uuid: &str) -> u32 {
    let granted = record.allocated().iter().filter(|grant| grant.uuid == uuid);
    granted.map(|grant| grant.cores_millis).fold(0, u32::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use tessera_model::allocation_id::AllocationId;
    use tessera_model::record::Grant;
    use tessera_model::sharing::Compute;

    const GIB: u64 = 1 << 30;

    fn share(gib: u64, cores_millis: u32) -> Record {
        let grant = Grant {
            uuid: "GPU-a".to_owned(),
            memory_limit_bytes: gib * GIB,
            context_overhead_bytes: GIB / 4,
            cores_millis,
            compute: Compute::Strict,
        };
        Record::new(AllocationId::of("claim:u", ["r"]), 1, vec![grant])
    }

    fn left(shares: &[Record]) -> Left {
        let capacity = Capacity { memory_bytes: 5 * GIB, reserve_bytes: GIB };
        Left::beside(capacity, "GPU-a", shares.iter())
    }

    #[test]
    fn a_gpu_without_time_or_without_memory_has_no_room_and_says_which() {
        let lack = |shares: &[Record]| left(shares).lack_of_any(GIB / 4);
        assert_eq!(lack(&[]), None);
        assert_eq!(lack(&[share(1, 1000)]), Some(Lack::Time));
        assert_eq!(lack(&[share(1, 995)]), Some(Lack::Time), "no scheduler counts so little");
        assert_eq!(lack(&[share(4, 100)]), Some(Lack::Memory));
        assert_eq!(lack(&[share(2, 500), share(2, 500)]), Some(Lack::Both));
        assert_eq!(lack(&[share(1, 400), share(1, 500)]), None);
        assert_eq!(left(&[share(1, 400)]).lack(3 * GIB, 600), None);
        assert_eq!(left(&[share(1, 400)]).lack(3 * GIB + 1, 600), Some(Lack::Memory));
        assert_eq!(left(&[share(9, 2000)]), Left { memory_bytes: 0, cores_millis: 0 });
    }

    #[test]
    fn memory_counts_as_it_is_held_and_time_as_it_was_allocated() {
        let share = share(1, 300);
        let less =
            Grant { memory_limit_bytes: 2 * GIB, cores_millis: 100, ..share.grants[0].clone() };
        let changed = share.with_limits(vec![less], BTreeMap::new());
        assert_eq!(left(&[changed]), Left { memory_bytes: 2 * GIB, cores_millis: 700 });
    }
}

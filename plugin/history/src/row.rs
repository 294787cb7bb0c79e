//! Some buckets of one series as bytes: of each only what differs from a quiet bucket, one that was observed from
//! beginning to end with the memory of the one before, where nothing was counted.

use std::collections::BTreeMap;

use super::cell::{COUNTS, Cell};
use super::level::Level;

/// Buckets of one series, by their place in the chunk.
pub(crate) type Buckets = BTreeMap<u32, Cell>;

/// Figures of a cell: those that seldom differ last, so that a busy one's flags take two bytes.
const FIELDS: usize = COUNTS + 7;
const PEAK: usize = COUNTS;
/// By how much the mean is below the peak.
const BELOW: usize = COUNTS + 1;
const BUSIEST: usize = COUNTS + 2;
const LIMIT: usize = COUNTS + 3;
const OVERHEAD: usize = COUNTS + 4;
const CORES: usize = COUNTS + 5;
const MS: usize = COUNTS + 6;
/// What a quiet bucket has of the one before.
const CARRIED: [usize; 4] = [PEAK, LIMIT, OVERHEAD, CORES];

type Fields = [u64; FIELDS];

fn fields(level: Level, cell: &Cell) -> Fields {
    let mut fields = [0; FIELDS];
    fields[..COUNTS].copy_from_slice(&cell.counts);
    fields[PEAK] = cell.peak_kib;
    fields[BELOW] = cell.peak_kib.saturating_sub(cell.mean_kib);
    // Ten seconds are their own busiest.
    fields[BUSIEST] = if level == Level::Fine { 0 } else { cell.busiest_millis.into() };
    fields[LIMIT] = cell.limit_kib;
    fields[OVERHEAD] = cell.overhead_kib;
    fields[CORES] = cell.cores_millis.into();
    fields[MS] = cell.ms;
    fields
}

fn cell(level: Level, fields: &Fields) -> Option<Cell> {
    let mut counts = [0; COUNTS];
    counts.copy_from_slice(&fields[..COUNTS]);
    let mut cell = Cell {
        ms: fields[MS],
        mean_kib: fields[PEAK].checked_sub(fields[BELOW])?,
        peak_kib: fields[PEAK],
        limit_kib: fields[LIMIT],
        overhead_kib: fields[OVERHEAD],
        cores_millis: u32::try_from(fields[CORES]).ok()?,
        busiest_millis: u32::try_from(fields[BUSIEST]).ok()?,
        counts,
    };
    if level == Level::Fine {
        cell.busiest_millis = cell.share_millis();
    }
    Some(cell)
}

fn quiet(level: Level, before: &Fields) -> Fields {
    let mut quiet = [0; FIELDS];
    CARRIED.iter().for_each(|at| quiet[*at] = before[*at]);
    quiet[MS] = u64::from(level.step_seconds()) * 1000;
    quiet
}

pub(crate) fn encode(level: Level, buckets: &Buckets) -> Vec<u8> {
    let mut out = Vec::new();
    put(&mut out, buckets.keys().fold(0, |bits, at| bits | 1 << at));
    let mut before = [0; FIELDS];
    for cell in buckets.values() {
        let (now, quiet) = (fields(level, cell), quiet(level, &before));
        let differs = |at: &usize| now[*at] != quiet[*at];
        put(&mut out, (0..FIELDS).filter(differs).fold(0, |bits, at| bits | 1 << at));
        for at in (0..FIELDS).filter(differs) {
            // Up and down alike in few bytes.
            let step = now[at].wrapping_sub(quiet[at]).cast_signed();
            put(&mut out, ((step << 1) ^ (step >> 63)).cast_unsigned());
        }
        before = now;
    }
    out
}

/// `None`: the row is damaged.
pub(crate) fn decode(level: Level, mut row: &[u8]) -> Option<Buckets> {
    let present = take(&mut row)?;
    if present >> level.buckets() != 0 {
        return None;
    }
    let (mut buckets, mut before) = (Buckets::new(), [0; FIELDS]);
    for at in (0..level.buckets()).filter(|at| present >> at & 1 != 0) {
        let flags = take(&mut row)?;
        let mut now = quiet(level, &before);
        for (_, figure) in now.iter_mut().enumerate().filter(|(at, _)| flags >> at & 1 != 0) {
            let coded = take(&mut row)?;
            let step = (coded >> 1).cast_signed() ^ -(coded & 1).cast_signed();
            *figure = figure.wrapping_add(step.cast_unsigned());
        }
        buckets.insert(at, cell(level, &now)?);
        before = now;
    }
    Some(buckets)
}

/// LEB128.
fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

fn take(row: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = row.split_first()?;
        *row = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cell() -> impl Strategy<Value = Cell> {
        let parts =
            (prop::array::uniform6(any::<u64>()), any::<[u64; COUNTS]>(), 0..3u32, 0..1001u32);
        parts.prop_map(
            |([ms, a, b, limit_kib, overhead_kib, cores], mut counts, quiet, busiest_millis)| {
                if quiet > 0 {
                    counts = [0; COUNTS];
                }
                Cell {
                    ms: if quiet == 2 { 10_000 } else { ms },
                    mean_kib: a.min(b),
                    peak_kib: a.max(b),
                    limit_kib,
                    overhead_kib,
                    cores_millis: u32::try_from(cores >> 32).unwrap_or(0),
                    busiest_millis,
                    counts,
                }
            },
        )
    }

    fn level() -> impl Strategy<Value = Level> {
        prop::sample::select(Level::ALL.to_vec())
    }

    proptest! {
        #[test]
        fn what_is_stored_is_what_is_read(
            level in level(),
            mut buckets in prop::collection::btree_map(0..12u32, cell(), 1..12),
        ) {
            // Ten seconds are their own busiest.
            for cell in buckets.values_mut().filter(|_| level == Level::Fine) {
                cell.busiest_millis = cell.share_millis();
            }
            prop_assert_eq!(decode(level, &encode(level, &buckets)), Some(buckets));
        }

        #[test]
        fn garbage_is_never_a_panic(level in level(), row in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(level, &row);
        }
    }

    #[test]
    fn a_quiet_tenant_takes_a_byte_a_bucket() {
        let quiet = Cell { ms: 10_000, mean_kib: 1 << 22, peak_kib: 1 << 22, ..Cell::default() };
        let row = encode(Level::Fine, &(0..30).map(|at| (at, quiet)).collect());
        assert!(row.len() < 45, "{}", row.len());
    }
}

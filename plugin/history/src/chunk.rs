//! Some buckets in a row of all series, as bytes: rows that fill a page of the file each.
//!
//! A row holds whole series: its number as a step from the one before, a bit for each bucket that it has, and for each
//! of these only what differs from a quiet bucket: one that was observed from beginning to end, with the memory of
//! the one before, where nothing was counted.

use std::collections::BTreeMap;

use super::cell::{COUNTS, Cell};
use super::level::Level;
use super::wire::{Reader, put, put_step};

/// Most bytes of a row, where a series does not need more: with its key, a page of redb.
const ROW: usize = 4000;

/// Buckets of one series, by their place in the chunk.
pub(crate) type Buckets = BTreeMap<u32, Cell>;
/// All series of a chunk, by number.
pub(crate) type Chunk = BTreeMap<u32, Buckets>;

const NOT_ALL: u64 = 1;
const UNEVEN: u64 = 1 << 1;
const PEAK: u64 = 1 << 2;
const LIMIT: u64 = 1 << 3;
const OVERHEAD: u64 = 1 << 4;
const CORES: u64 = 1 << 5;
/// Those of the counts, in their order. Rows of schema 2 and before have neither what was used nor what was measured.
const COUNT: [u32; COUNTS] = [6, 7, 8, 9, 13, 14, 10, 11];
/// The highest share, in buckets of more than ten seconds. Rows of schema 1 have none.
const BUSIEST: u64 = 1 << 12;
/// Beyond all flags.
const END: u64 = 1 << 15;

/// As rows.
pub(crate) fn encode(level: Level, chunk: &Chunk) -> Vec<Vec<u8>> {
    let mut rows = Vec::new();
    let (mut row, mut before) = (Vec::new(), 0u32);
    let mut one = Vec::new();
    for (number, buckets) in chunk {
        one.clear();
        encode_series(level, buckets, &mut one);
        if !row.is_empty() && row.len() + one.len() + 5 > ROW {
            rows.push(std::mem::take(&mut row));
            before = 0;
        }
        put(&mut row, u64::from(number - before));
        before = *number;
        row.extend_from_slice(&one);
    }
    if !row.is_empty() {
        rows.push(row);
    }
    rows
}

fn encode_series(level: Level, buckets: &Buckets, out: &mut Vec<u8>) {
    let present = buckets.keys().fold(0u64, |bits, at| bits | 1 << at);
    put(out, present);
    let mut before = Cell::default();
    let whole = u64::from(level.step_seconds()) * 1000;
    for cell in buckets.values() {
        let mut flags = 0;
        let mut mark = |flag: u64, is: bool| flags |= if is { flag } else { 0 };
        mark(NOT_ALL, cell.ms != whole);
        mark(UNEVEN, cell.mean_kib != cell.peak_kib);
        mark(PEAK, cell.peak_kib != before.peak_kib);
        mark(LIMIT, cell.limit_kib != before.limit_kib);
        mark(OVERHEAD, cell.overhead_kib != before.overhead_kib);
        mark(CORES, cell.cores_millis != before.cores_millis);
        cell.counts.iter().zip(COUNT).for_each(|(count, bit)| mark(1 << bit, *count != 0));
        mark(BUSIEST, level != Level::Fine && cell.busiest_millis != 0);
        put(out, flags);
        if flags & NOT_ALL != 0 {
            put(out, cell.ms);
        }
        if flags & PEAK != 0 {
            put_step(out, before.peak_kib, cell.peak_kib);
        }
        if flags & UNEVEN != 0 {
            put(out, cell.peak_kib - cell.mean_kib);
        }
        if flags & LIMIT != 0 {
            put_step(out, before.limit_kib, cell.limit_kib);
        }
        if flags & OVERHEAD != 0 {
            put_step(out, before.overhead_kib, cell.overhead_kib);
        }
        if flags & CORES != 0 {
            put(out, u64::from(cell.cores_millis));
        }
        cell.counts.iter().filter(|count| **count != 0).for_each(|count| put(out, *count));
        if flags & BUSIEST != 0 {
            put(out, u64::from(cell.busiest_millis));
        }
        before = *cell;
    }
}

/// Adds what a row has to `chunk`. `None`: the row is damaged; what it had before the damage is there.
pub(crate) fn decode(level: Level, row: &[u8], chunk: &mut Chunk) -> Option<()> {
    visit(
        level,
        row,
        |_| true,
        |number, at, cell| {
            chunk.entry(number).or_default().insert(at, cell);
        },
    )
}

/// Hands over what a row has of the series that are wanted: a series' number, a bucket's place, and what is in it.
/// `None`: the row is damaged; what it had before the damage was handed over.
pub(crate) fn visit(
    level: Level,
    row: &[u8],
    wanted: impl Fn(u32) -> bool,
    mut take: impl FnMut(u32, u32, Cell),
) -> Option<()> {
    let mut reader = Reader(row);
    let mut number = 0u32;
    while !reader.is_empty() {
        number = number.checked_add(u32::try_from(reader.number()?).ok()?)?;
        let present = reader.number()?;
        if present >> level.buckets() != 0 {
            return None;
        }
        let is_wanted = wanted(number);
        let mut before = Cell::default();
        for at in (0..level.buckets()).filter(|at| present >> at & 1 != 0) {
            before = decode_cell(level, &mut reader, &before)?;
            if is_wanted {
                take(number, at, before);
            }
        }
    }
    Some(())
}

fn decode_cell(level: Level, reader: &mut Reader<'_>, before: &Cell) -> Option<Cell> {
    let flags = reader.number()?;
    if flags >= END {
        return None;
    }
    let has = |flag: u64| flags & flag != 0;
    let mut cell = Cell { counts: [0; COUNTS], busiest_millis: 0, ..*before };
    cell.ms = if has(NOT_ALL) { reader.number()? } else { u64::from(level.step_seconds()) * 1000 };
    if has(PEAK) {
        cell.peak_kib = reader.step(before.peak_kib)?;
    }
    cell.mean_kib = cell.peak_kib;
    if has(UNEVEN) {
        cell.mean_kib = cell.peak_kib.checked_sub(reader.number()?)?;
    }
    if has(LIMIT) {
        cell.limit_kib = reader.step(before.limit_kib)?;
    }
    if has(OVERHEAD) {
        cell.overhead_kib = reader.step(before.overhead_kib)?;
    }
    if has(CORES) {
        cell.cores_millis = u32::try_from(reader.number()?).ok()?;
    }
    for (count, bit) in cell.counts.iter_mut().zip(COUNT) {
        if has(1 << bit) {
            *count = reader.number()?;
        }
    }
    if has(BUSIEST) {
        cell.busiest_millis = u32::try_from(reader.number()?).ok()?;
    } else if level == Level::Fine {
        cell.busiest_millis = cell.share_millis();
    }
    Some(cell)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cell::tenant;

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
            mut series in prop::collection::btree_map(any::<u32>(), prop::collection::btree_map(0..12u32, cell(), 1..12), 0..40),
        ) {
            // Ten seconds are their own busiest.
            for cell in series.values_mut().flat_map(BTreeMap::values_mut) {
                if level == Level::Fine {
                    cell.busiest_millis = cell.share_millis();
                }
            }
            let mut read = Chunk::new();
            for row in encode(level, &series) {
                prop_assert!(row.len() <= ROW || row.len() < 12 * 160);
                prop_assert_eq!(decode(level, &row, &mut read), Some(()));
            }
            prop_assert_eq!(read, series);
        }

        #[test]
        fn garbage_is_never_a_panic(level in level(), row in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut read = Chunk::new();
            let _ = decode(level, &row, &mut read);
        }
    }

    #[test]
    fn rows_of_the_schema_before_are_read_and_do_not_say_what_was_used() {
        let mut row = Vec::new();
        let [got, waited, refusals, launches, busiest] = [6, 7, 10, 11, 12].map(|bit| 1 << bit);
        let flags = got | waited | refusals | launches | busiest;
        for number in [7, 1, flags, 36_000_000, 70, 3, 9, 1000] {
            put(&mut row, number);
        }
        let mut read = Chunk::new();
        assert_eq!(decode(Level::Coarse, &row, &mut read), Some(()));
        let mut counts = [0; COUNTS];
        for (at, count) in [
            (tenant::GOT, 36_000_000),
            (tenant::WAITED, 70),
            (tenant::REFUSALS, 3),
            (tenant::LAUNCHES, 9),
        ] {
            counts[at] = count;
        }
        let cell = Cell { ms: 3_600_000, busiest_millis: 1000, counts, ..Cell::default() };
        assert_eq!(read[&7][&0], cell);
    }

    #[test]
    fn a_quiet_tenant_takes_a_byte_a_bucket() {
        let quiet = Cell { ms: 10_000, mean_kib: 1 << 22, peak_kib: 1 << 22, ..Cell::default() };
        let chunk = Chunk::from([(7, (0..30).map(|at| (at, quiet)).collect())]);
        let rows = encode(Level::Fine, &chunk);
        assert!(rows[0].len() < 45, "{}", rows[0].len());
    }
}

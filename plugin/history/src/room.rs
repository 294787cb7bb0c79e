//! How large the file is made. redb doubles a file that is full, so that a bound would waste up to half of itself.
//! A new file is therefore made as large as its bound allows, and stays so: nothing grows later, a full disk is
//! noticed at once, and no compaction is ever needed.

use std::path::Path;

use redb::{Database, ReadableDatabase, TableDefinition};

use super::backend::Extent;
use tessera_system::files;

const PAGE: u64 = 4096;
/// Files with a larger bound grow as redb does it: making them large at once would take too much memory.
const LARGEST: u64 = 64 << 20;

/// Bytes that stay free on the disk for the ledger, which lies beside the file and without which no pod starts.
const LEDGERS: u64 = 16 << 20;

const FILL: TableDefinition<u64, &[u8]> = TableDefinition::new("fill");
/// Has one row, which is written last and never again: as long as it is in a file's upper half, redb does not shorten the
/// file.
const PILLAR: TableDefinition<u64, &[u8]> = TableDefinition::new("pillar-6");

/// Pages in a file of this length.
pub(crate) fn pages(len: u64) -> u64 {
    (len / PAGE).saturating_sub(1)
}

/// Pages that the file has or may still get.
pub(crate) fn ceiling(extent: &Extent) -> u64 {
    let mut pages = pages(extent.len()).max(1);
    while (2 * pages + 1) * PAGE <= extent.bound() {
        pages *= 2;
    }
    pages
}

/// The next growth on the way to the largest file: a value of so many pages, which redb makes room for twice over.
fn next(pages: u64, limit: u64) -> Option<u64> {
    fn reach(pages: u64, limit: u64) -> (u64, Option<u64>) {
        let grows = (4..16).map(|order| 1u64 << order);
        let fits = grows.filter(|by| 2 * by >= pages && pages + 2 * by <= limit);
        fits.map(|by| (reach(pages + 2 * by, limit).0, Some(by))).max().unwrap_or((pages, None))
    }
    reach(pages, limit).1
}

/// Sees to it that the disk has room for a new file in `dir` and still for the ledger.
///
/// # Errors
/// It has not, in words; or it does not tell.
pub(crate) fn on_disk(dir: &Path, bound: u64) -> Result<(), String> {
    let available = files::available_bytes(dir).map_err(|error| error.to_string())?;
    // A larger one begins as small as redb makes it.
    let bytes = if bound > LARGEST { 0 } else { bound };
    if available >= bytes.saturating_add(LEDGERS) {
        return Ok(());
    }
    let mib = |bytes: u64| bytes >> 20;
    Err(format!(
        "the disk has {} MiB free; the file takes {} MiB, and {} MiB stay for the ledger",
        mib(available),
        mib(bytes),
        mib(LEDGERS),
    ))
}

/// Makes a database as large as it may be.
pub(crate) fn take(db: &Database, extent: &Extent) -> Result<(), redb::Error> {
    if extent.bound() > LARGEST {
        return Ok(());
    }
    let limit = (extent.bound() / PAGE).saturating_sub(1);
    // What a kill left of it.
    let write = db.begin_write()?;
    write.delete_table(FILL)?;
    write.commit()?;
    for attempt in 0..8 {
        let Some(by) = next(pages(extent.len()), limit) else { break };
        let value = vec![0; usize::try_from(by * PAGE).unwrap_or(0).saturating_sub(512)];
        let write = db.begin_write()?;
        write.open_table(FILL)?.insert(attempt, value.as_slice())?;
        write.commit()?;
    }
    let free = {
        let write = db.begin_write()?;
        let used = write.stats()?.allocated_pages();
        write.abort()?;
        let all = pages(extent.len());
        // Branches of the tree take some, too.
        all.saturating_sub(used + 32 + all / 32)
    };
    let write = db.begin_write()?;
    {
        let row = [0u8; 4000];
        let mut fill = write.open_table(FILL)?;
        for n in 0..free {
            fill.insert(8 + n, row.as_slice())?;
        }
        write.open_table(PILLAR)?.insert(0, [0u8; 8].as_slice())?;
    }
    write.commit()?;
    let write = db.begin_write()?;
    write.delete_table(FILL)?;
    write.commit()?;
    // Frees what was deleted.
    for _ in 0..2 {
        db.begin_write()?.commit()?;
    }
    drop(db.begin_read()?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use redb::backends::InMemoryBackend;

    use super::*;
    use crate::backend::Bounded;

    #[test]
    fn a_disk_must_have_room_for_the_file_and_the_ledger() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(on_disk(dir.path(), 1 << 20), Ok(()));
        let available = files::available_bytes(dir.path()).unwrap();
        // Nobody else's files make it less than this.
        if available < LARGEST {
            let error = on_disk(dir.path(), LARGEST).unwrap_err();
            assert!(error.contains("stay for the ledger"), "{error}");
        }
    }

    #[test]
    fn a_new_file_is_near_its_bound_and_keeps_its_length() {
        for (mib, part) in [(4, 60), (8, 70), (16, 70)] {
            let extent = Extent::new(mib << 20);
            let backend = Bounded::new(InMemoryBackend::new(), extent.clone(), false).unwrap();
            let db = Database::builder().create_with_backend(backend).unwrap();
            crate::store::prepare(&db, &extent).unwrap();
            let len = extent.len();
            assert!(len * 100 >= (mib << 20) * part, "{mib} MiB: {len}");
            for n in 0..30 {
                let write = db.begin_write().unwrap();
                write.open_table(FILL).unwrap().insert(n, [0u8; 2000].as_slice()).unwrap();
                write.commit().unwrap();
                assert_eq!(extent.len(), len, "commit {n}");
            }
            let write = db.begin_write().unwrap();
            assert!(write.stats().unwrap().allocated_pages() < 80);
        }
    }
}

//! The redb file: what is written together, what is dropped, what is read.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use redb::{
    Database, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};

use super::backend::Extent;
use super::cell::Cell;
use super::chunk::{self, Chunk};
use super::level::Level;
use super::room;
use super::series::{Key, Named, Series};
use tessera_system::files::Identity;
use tessera_system::noted::Noted;

/// Version of what the tables hold. Version 1 had no highest shares.
pub(crate) const SCHEMA: u64 = 3;
/// Versions whose tables this one reads, and writes on in.
pub(crate) const UPGRADED: std::ops::Range<u64> = 1..SCHEMA;
/// Numbers by name.
pub(crate) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// In [`META`]: [`SCHEMA`].
pub(crate) const META_SCHEMA: &str = "schema";
/// In [`META`]: the number of the next series.
pub(crate) const META_NEXT: &str = "next";
/// In [`META`]: the bound that the file was made for.
pub(crate) const META_BOUND: &str = "bound";
/// In [`META`]: how often something was stored.
pub(crate) const META_COMMITS: &str = "commits";
/// In [`META`]: where the newest bucket of what was stored last ended.
pub(crate) const META_UNTIL: &str = "until";
/// [`Named`] by the number of a series.
pub(crate) const NAMES: TableDefinition<u32, &[u8]> = TableDefinition::new("names");
/// Rows of [`chunk`] by level, beginning in Unix seconds, and place.
pub(crate) const ROWS: TableDefinition<(u8, u32, u16), &[u8]> = TableDefinition::new("rows");

/// How long a name is kept that the file has nothing of, seconds: its last second is noted once in half of that.
const LATE: u32 = 7200;
/// Chunks of a level that age takes as one begins.
const AGED: usize = 2;
/// Rows that are dropped in one transaction.
const DROPPED: usize = 48;
/// Pages that are always left: what a transaction changes is written to new ones.
const SPARE: u64 = 40;

/// What is to be stored of one bucket of ten seconds: series and cells.
pub(crate) type Bucket = Vec<(Series, Cell)>;

/// An open file.
pub(crate) struct Store {
    db: Arc<Database>,
    /// The same file, for what redb knows nothing of.
    file: File,
    extent: Arc<Extent>,
    /// What was stored last.
    noted: Noted,
    /// Numbers of series that were written of late, and the last second that their names note.
    known: HashMap<Key, (u32, Named)>,
    /// Pages in use at most, by what was written since they were counted.
    used: u64,
    /// Seconds that each level keeps.
    keep: [u32; 3],
}

/// Cells by series and bucket.
type Cells = BTreeMap<u32, BTreeMap<u32, Cell>>;

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("extent", &self.extent).finish_non_exhaustive()
    }
}

/// Makes the tables of a new file.
pub(crate) fn prepare(db: &Database, extent: &Extent) -> Result<(), redb::Error> {
    let write = db.begin_write()?;
    {
        let mut meta = write.open_table(META)?;
        meta.insert(META_SCHEMA, SCHEMA)?;
        meta.insert(META_NEXT, 0)?;
        meta.insert(META_BOUND, extent.bound())?;
    }
    write.open_table(NAMES)?;
    write.open_table(ROWS)?;
    write.commit()?;
    room::take(db, extent)
}

impl Store {
    /// Goes on with a file that has its tables.
    pub(crate) fn new(
        db: Arc<Database>,
        file: File,
        extent: Arc<Extent>,
        keep: [u32; 3],
    ) -> Result<Self, redb::Error> {
        let mut known = HashMap::new();
        let reader = Reader::begin(&db)?;
        let newest = reader.newest()?.unwrap_or(0);
        reader.names(|number, named| {
            if newest.saturating_sub(named.last) <= LATE {
                known.insert(named.series.key.clone(), (number, named));
            }
        })?;
        let noted = reader.noted()?;
        noted.write(&file)?;
        Ok(Store { db, file, extent, noted, known, used: u64::MAX, keep })
    }

    /// What tells the file from another that has taken its name.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn identity(&self) -> std::io::Result<Identity> {
        Ok(Identity::of(&self.file.metadata()?))
    }

    /// Whether the file at `path` is still this one, as long as it was left.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        match (std::fs::metadata(path), self.identity()) {
            (Ok(there), Ok(own)) => Identity::of(&there) == own && there.len() == self.extent.len(),
            (Err(error), _) => error.kind() != std::io::ErrorKind::NotFound,
            // A disk that does not tell will refuse what is written, too.
            (_, Err(_)) => true,
        }
    }

    pub(crate) fn set_keep(&mut self, keep: [u32; 3]) {
        self.keep = keep;
    }

    /// The file, to read from while others write.
    pub(crate) fn db(&self) -> Arc<Database> {
        Arc::clone(&self.db)
    }

    pub(crate) fn extent(&self) -> &Arc<Extent> {
        &self.extent
    }

    /// Adds buckets of ten seconds, by their beginnings, to all levels; all of it, or on an error nothing. `now` is of the
    /// wall clock, Unix seconds.
    pub(crate) fn add(
        &mut self,
        buckets: &BTreeMap<u32, Bucket>,
        now: u32,
    ) -> Result<(), redb::Error> {
        let Some(newest) = buckets.keys().next_back().copied() else { return Ok(()) };
        let write = self.db.begin_write()?;
        let mut named = Vec::new();
        let chunks = self.chunks(&write, buckets, newest, &mut named)?;
        let mut rows = Vec::new();
        for ((level, start), added) in chunks {
            let mut all = Chunk::new();
            let table = write.open_table(ROWS)?;
            let mut was = Vec::new();
            for row in table.range(keys(level, start, start))? {
                let (key, bytes) = row?;
                // What is damaged is left out; redb's checksums make that another version's doing.
                let _ = chunk::decode(level, bytes.value(), &mut all);
                was.push(key.value());
            }
            for (number, buckets) in added {
                let series = all.entry(number).or_default();
                for (at, cell) in buckets {
                    series.entry(at).and_modify(|before| before.add(level, &cell)).or_insert(cell);
                }
            }
            rows.push((level, start, was, chunk::encode(level, &all)));
        }
        let need = rows.iter().map(|(.., rows)| rows.len() as u64).sum::<u64>();
        let need = 2 * (need + named.len() as u64 / 8) + SPARE;
        if self.used.saturating_add(need) > room::ceiling(&self.extent) {
            self.used = write.stats()?.allocated_pages();
            if self.used + need > room::ceiling(&self.extent) {
                write.abort()?;
                self.make_room(need, now)?;
                return self.add(buckets, now);
            }
        }
        {
            let mut names = write.open_table(NAMES)?;
            for (number, named) in &named {
                names.insert(number, named.encode().as_slice())?;
            }
            let mut table = write.open_table(ROWS)?;
            for (level, start, was, rows) in &rows {
                for (row, part) in rows.iter().zip(0u16..) {
                    table.insert((level.number(), *start, part), row.as_slice())?;
                }
                for key in was.iter().filter(|key| usize::from(key.2) >= rows.len()) {
                    table.remove(key)?;
                }
            }
        }
        let mut is_coarse_gone = false;
        for (level, ..) in rows.iter().filter(|(_, _, was, _)| was.is_empty()) {
            is_coarse_gone |= self.age(&write, *level, now)? && *level == Level::Coarse;
        }
        let until = newest.saturating_add(Level::Fine.step_seconds());
        let noted = Noted { commits: self.noted.commits + 1, until };
        {
            let mut meta = write.open_table(META)?;
            meta.insert(META_COMMITS, noted.commits)?;
            meta.insert(META_UNTIL, u64::from(noted.until))?;
        }
        write.commit()?;
        self.noted = noted;
        // Without it, a repair would not be noticed; what is stored is stored.
        let _ = noted.write(&self.file);
        self.used = self.used.saturating_add(need - SPARE);
        for (number, named) in named {
            self.known.insert(named.series.key.clone(), (number, named));
        }
        self.known.retain(|_, (_, named)| newest.saturating_sub(named.last) <= LATE);
        // A name goes with its last bucket: dead ones would take the place of what is kept.
        if is_coarse_gone {
            self.drop_names()?;
        }
        Ok(())
    }

    /// The buckets as chunks of every level, and the names that have to be written.
    fn chunks(
        &self,
        write: &WriteTransaction,
        buckets: &BTreeMap<u32, Bucket>,
        newest: u32,
        named: &mut Vec<(u32, Named)>,
    ) -> Result<BTreeMap<(Level, u32), Chunk>, redb::Error> {
        let mut meta = write.open_table(META)?;
        let first = meta.get(META_NEXT)?.map_or(0, |next| next.value());
        let mut next = u32::try_from(first).unwrap_or(u32::MAX);
        let mut numbers: HashMap<&Key, u32> = HashMap::new();
        let mut chunks: BTreeMap<(Level, u32), Chunk> = BTreeMap::new();
        for (second, cells) in buckets {
            for (series, cell) in cells {
                let number = match numbers.get(&series.key) {
                    Some(number) => *number,
                    None => {
                        let known = self.known.get(&series.key);
                        let number = known.map_or(next, |(number, _)| *number);
                        next += u32::from(known.is_none());
                        let is_noted = known.is_some_and(|(_, named)| {
                            named.series == *series && newest.saturating_sub(named.last) < LATE / 2
                        });
                        if !is_noted {
                            let series = series.clone();
                            named.push((number, Named { series, last: newest }));
                        }
                        numbers.insert(&series.key, number);
                        number
                    }
                };
                for level in Level::ALL {
                    let start = level.chunk(*second);
                    let at = (second - start) / level.step_seconds();
                    let series =
                        chunks.entry((level, start)).or_default().entry(number).or_default();
                    series.entry(at).and_modify(|before| before.add(level, cell)).or_insert(*cell);
                }
            }
        }
        if u64::from(next) != first {
            meta.insert(META_NEXT, u64::from(next))?;
        }
        Ok(chunks)
    }

    /// Drops the oldest chunks of a level that are older than what is kept; whether there were such. No more than a few go
    /// as one begins, so that a clock that is ahead for a while takes little.
    fn age(&self, write: &WriteTransaction, level: Level, now: u32) -> Result<bool, redb::Error> {
        let mut table = write.open_table(ROWS)?;
        let keep = self.keep[level as usize];
        let until = now.saturating_sub(keep).saturating_sub(level.chunk_seconds());
        let mut old = Vec::new();
        let mut chunks = HashSet::new();
        for row in table.range(keys(level, 0, until))? {
            let key = row?.0.value();
            chunks.insert(key.1);
            if chunks.len() > AGED {
                break;
            }
            old.push(key);
        }
        for key in &old {
            table.remove(key)?;
        }
        Ok(!old.is_empty())
    }

    /// Drops the oldest until so many pages are free.
    fn make_room(&mut self, need: u64, now: u32) -> Result<(), redb::Error> {
        let ceiling = room::ceiling(&self.extent);
        // A little more than is needed, so that not every transaction has to.
        self.drop_until(ceiling.saturating_sub(need + ceiling / 32), now)
    }

    /// Makes the file so short that it can be made as large as its bound again: redb grows it by doubling.
    pub(crate) fn shrink(&mut self) -> Result<(), redb::Error> {
        let half = room::pages(self.extent.bound()) / 2;
        self.drop_until(half.saturating_sub(2 * SPARE), u32::MAX)?;
        // Whoever opens it has it alone.
        if let Some(db) = Arc::get_mut(&mut self.db) {
            db.compact()?;
        }
        Ok(())
    }

    /// Drops the oldest of the finest until no more pages are used, in small transactions: each needs pages itself before
    /// it frees some.
    fn drop_until(&mut self, most: u64, now: u32) -> Result<(), redb::Error> {
        let mut coarse_gone = false;
        loop {
            let write = self.db.begin_write()?;
            self.used = write.stats()?.allocated_pages();
            if self.used <= most {
                write.abort()?;
                break;
            }
            let dropped = drop_oldest(&write, now, &mut coarse_gone)?;
            write.commit()?;
            // Pages of a transaction are free after the next one.
            self.db.begin_write()?.commit()?;
            if dropped == 0 {
                let freed = self.drop_names()?;
                if freed == 0 {
                    let error = "nothing is left to drop; history.size is too little for this node";
                    return Err(redb::Error::Io(std::io::Error::other(error)));
                }
            }
        }
        if coarse_gone {
            self.drop_names()?;
        }
        Ok(())
    }

    /// Drops names that the file has nothing of any more. How many.
    pub(crate) fn drop_names(&mut self) -> Result<usize, redb::Error> {
        let reader = Reader::begin(&self.db)?;
        let oldest = Level::ALL.into_iter().map(|level| reader.oldest(level));
        let oldest = oldest.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().min();
        let mut gone = Vec::new();
        reader.names(|number, named| {
            let is_over = oldest.is_none_or(|oldest| named.last.saturating_add(LATE) < oldest);
            if is_over && !self.known.contains_key(&named.series.key) {
                gone.push(number);
            }
        })?;
        drop(reader);
        for some in gone.chunks(512) {
            let write = self.db.begin_write()?;
            {
                let mut names = write.open_table(NAMES)?;
                for number in some {
                    names.remove(number)?;
                }
            }
            write.commit()?;
        }
        Ok(gone.len())
    }
}

/// Drops rows of the oldest chunk of the finest level that has more than its floor; where none has, of the coarsest.
/// What a clock that was ahead left beyond `now` keeps nothing else from its floor.
fn drop_oldest(
    write: &WriteTransaction,
    now: u32,
    coarse_gone: &mut bool,
) -> Result<usize, redb::Error> {
    let mut table = write.open_table(ROWS)?;
    let mut victim = None;
    for level in Level::ALL {
        let first = table.range(keys(level, 0, u32::MAX))?.next().transpose()?;
        let Some(first) = first.map(|row| row.0.value().1) else { continue };
        let until = if first <= now { now } else { u32::MAX };
        let last = table.range(keys(level, first, until))?.next_back().transpose()?;
        let last = last.map_or(first, |row| row.0.value().1);
        if last - first >= level.floor_seconds() {
            victim = Some((level, first));
            break;
        }
        if last > first {
            // The coarsest that has more than the chunk that is being filled.
            victim = Some((level, first));
        }
    }
    let Some((level, start)) = victim else { return Ok(0) };
    *coarse_gone |= level == Level::Coarse;
    let mut rows = Vec::new();
    for row in table.range(keys(level, start, start))?.take(DROPPED) {
        rows.push(row?.0.value());
    }
    for key in &rows {
        table.remove(key)?;
    }
    Ok(rows.len())
}

/// Rows of the chunks that begin from one second to another.
pub(crate) fn keys(
    level: Level,
    from: u32,
    until: u32,
) -> std::ops::RangeInclusive<(u8, u32, u16)> {
    (level.number(), from, 0)..=(level.number(), until, u16::MAX)
}

/// The file as it was at one moment.
pub(crate) struct Reader(ReadTransaction);

impl Reader {
    pub(crate) fn begin(db: &Database) -> Result<Self, redb::Error> {
        Ok(Reader(db.begin_read()?))
    }

    /// All names, by number.
    pub(crate) fn names(&self, mut visit: impl FnMut(u32, Named)) -> Result<(), redb::Error> {
        for entry in self.0.open_table(NAMES)?.iter()? {
            let (number, bytes) = entry?;
            if let Some(named) = Named::decode(bytes.value()) {
                visit(number.value(), named);
            }
        }
        Ok(())
    }

    /// The beginning of a level's oldest chunk.
    pub(crate) fn oldest(&self, level: Level) -> Result<Option<u32>, redb::Error> {
        let table = self.0.open_table(ROWS)?;
        let first = table.range(keys(level, 0, u32::MAX))?.next().transpose()?;
        Ok(first.map(|row| row.0.value().1))
    }

    pub(crate) fn oldest_bucket(&self, level: Level) -> Result<Option<u32>, redb::Error> {
        let Some(start) = self.oldest(level)? else { return Ok(None) };
        let table = self.0.open_table(ROWS)?;
        let mut first = None;
        for row in table.range(keys(level, start, start))? {
            let note = |_, at, _| first = Some(first.map_or(at, |first: u32| first.min(at)));
            let _ = chunk::visit(level, row?.1.value(), |_| true, note);
            if first == Some(0) {
                break;
            }
        }
        Ok(first.map(|at| start + at * level.step_seconds()))
    }

    /// The second at which the newest chunk ends.
    fn newest(&self) -> Result<Option<u32>, redb::Error> {
        let table = self.0.open_table(ROWS)?;
        let last = table.range(keys(Level::Fine, 0, u32::MAX))?.next_back().transpose()?;
        Ok(last.map(|row| row.0.value().1.saturating_add(Level::Fine.chunk_seconds())))
    }

    /// What was stored last; nothing by an earlier version.
    pub(crate) fn noted(&self) -> Result<Noted, redb::Error> {
        let meta = self.0.open_table(META)?;
        let commits = meta.get(META_COMMITS)?.map_or(0, |commits| commits.value());
        let until = meta.get(META_UNTIL)?.map_or(0, |until| until.value());
        Ok(Noted { commits, until: u32::try_from(until).unwrap_or(u32::MAX) })
    }

    /// Buckets that begin from one second to another, both included, of the series that are wanted; `None` where
    /// that are more than `most`.
    pub(crate) fn cells(
        &self,
        level: Level,
        (from, until): (u32, u32),
        most: usize,
        wanted: impl Fn(u32) -> bool,
    ) -> Result<Option<Cells>, redb::Error> {
        let mut count = 0;
        let table = self.0.open_table(ROWS)?;
        let mut found = Cells::new();
        for row in table.range(keys(level, level.chunk(from), until))? {
            let (key, bytes) = row?;
            let start = key.value().1;
            let _ = chunk::visit(level, bytes.value(), &wanted, |number, at, cell| {
                let second = start + at * level.step_seconds();
                if (from..=until).contains(&second) {
                    found.entry(number).or_default().insert(second, cell);
                    count += 1;
                }
            });
            if count > most {
                return Ok(None);
            }
        }
        Ok(Some(found))
    }
}

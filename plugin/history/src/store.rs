//! The redb file: opening it whatever state it is in, rows of buckets, which are dropped by age and by size, and the names
//! of their series. Nothing that another version wrote is lost, and nothing that lies there ends the process.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::{
    Database, ReadTransaction, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition,
    TableError,
};
use tessera_system::files::{self, Identity};
use tessera_system::panics;

use super::query::{Key, Series};
use super::row::{self, Buckets, Cell, Level};

/// redb's default would be a gigabyte.
const CACHE_BYTES: usize = 256 << 10;
/// Bytes that stay free on the disk for the ledger, which lies beside the file and without which no pod starts.
const LEDGERS: u64 = 16 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub path: PathBuf,
    /// Most bytes that are in use in it.
    pub bound: u64,
    /// Seconds that buckets of 10 s, 5 min and 1 h are kept.
    pub keep: [u32; 3],
    /// Whether commits wait for the disk. Without, a power cut may damage the file; a kill never does.
    pub sync: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    Existing,
    Created,
    /// It was put aside, and this one made.
    Aside {
        kept_as: PathBuf,
        reason: String,
    },
}

/// Why nothing could be stored. What was to be stored waits for half an hour.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    #[error("history {0} is in use by another process; nothing is recorded until that ends")]
    InUse(PathBuf),
    #[error(
        "history {path}: {error}; nothing is recorded. Free space on the disk, make the directory of paths.ledger \
         writable, or set history.enabled = false"
    )]
    Unopened { path: PathBuf, error: String },
    /// It could not be written. It is opened again the next time.
    #[error("history {path} cannot be written: {error}; it is tried again every minute")]
    Unwritten { path: PathBuf, error: String },
}

enum Unopened {
    InUse,
    /// The file's content is the reason: what it is kept as, and why.
    Content(String, String),
    Disk(String),
}

pub(crate) fn open(options: &Options) -> Result<(Store, Found), FlushError> {
    let path = options.path.clone();
    find(options).map_err(|unopened| match unopened {
        Unopened::InUse => FlushError::InUse(path),
        Unopened::Content(_, error) | Unopened::Disk(error) => FlushError::Unopened { path, error },
    })
}

fn find(options: &Options) -> Result<(Store, Found), Unopened> {
    let path = &options.path;
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    files::file_or_nothing(path).map_err(|error| Unopened::Disk(error.to_string()))?;
    if !std::fs::metadata(path).is_ok_and(|meta| meta.len() > 0) {
        return Ok((guarded(|| create(options))?, Found::Created));
    }
    let (aside, reason) = match guarded(|| look(options)) {
        Ok(store) => return Ok((store, Found::Existing)),
        Err(Unopened::Content(aside, reason)) => (aside, reason),
        Err(other) => return Err(other),
    };
    let kept_as = beside(path, &aside);
    std::fs::rename(path, &kept_as).map_err(|error| {
        let to = kept_as.display();
        Unopened::Disk(format!("{reason}, and it cannot be renamed to {to}: {error}"))
    })?;
    Ok((guarded(|| create(options))?, Found::Aside { kept_as, reason }))
}

fn beside(path: &Path, what: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{name}.{what}"))
}

/// A new file, made beside its place: one of which a kill left half is never taken for whole.
fn create(options: &Options) -> Result<Store, Unopened> {
    let new = Options { path: beside(&options.path, "new"), ..options.clone() };
    has_room(&options.path).map_err(Unopened::Disk)?;
    // What a kill left of an earlier one.
    let _ = std::fs::remove_file(&new.path);
    let (db, file) = database(&new)?;
    prepare(&db)?;
    let store = Store::new(db, file, options)?;
    std::fs::rename(&new.path, &options.path)?;
    Ok(store)
}

/// Sees to it that the disk has room for the ledger beside the file at `path`.
pub(crate) fn has_room(path: &Path) -> Result<(), String> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let available = files::available_bytes(dir).map_err(|error| error.to_string())?;
    if available >= LEDGERS {
        return Ok(());
    }
    let [available, ledgers] = [available, LEDGERS].map(|bytes| bytes >> 20);
    Err(format!("the disk has {available} MiB free, and {ledgers} MiB stay for the ledger"))
}

/// A file, which waits for the disk or not. redb's own way to leave out the wait keeps commits in the process, and a kill
/// would lose them.
#[derive(Debug)]
struct Backend {
    file: File,
    sync: bool,
}

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        if self.sync { self.file.sync_data() } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    fn close(&self) -> io::Result<()> {
        // A child that has not yet begun its program has the descriptor still.
        self.file.unlock()
    }
}

fn database(options: &Options) -> Result<(Database, File), Unopened> {
    let file = files::open_private(&options.path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(Unopened::InUse),
        Err(TryLockError::Error(error)) => return Err(error.into()),
    }
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    let backend = Backend { file: file.try_clone()?, sync: options.sync };
    Ok((builder.create_with_backend(backend)?, file))
}

/// Opens a file that is there, and reads all of it once.
fn look(options: &Options) -> Result<Store, Unopened> {
    let (mut db, file) = database(options)?;
    // What redb could repair, it has repaired: at most the newest commits are gone.
    let _is_unharmed: bool = db.check_integrity()?;
    let schema = match db.begin_read()?.open_table(META) {
        Ok(meta) => meta.get(META_SCHEMA)?.map_or(0, |schema| schema.value()),
        Err(TableError::TableDoesNotExist(_)) => {
            return Err(unreadable("it is another program's"));
        }
        Err(error) => return Err(error.into()),
    };
    if schema != SCHEMA {
        let reason =
            format!("version {schema} of Tessera's history wrote it, this one reads {SCHEMA}");
        return Err(Unopened::Content(format!("schema-{schema}"), reason));
    }
    Ok(Store::new(db, file, options)?)
}

/// redb is meant to report damage, and sometimes panics instead.
fn guarded<T>(work: impl FnOnce() -> Result<T, Unopened>) -> Result<T, Unopened> {
    panics::caught(work)
        .unwrap_or_else(|message| Err(unreadable(&format!("its reader panicked: {message}"))))
}

/// The whole of a file can be read.
pub(crate) fn read(db: &Database) -> Result<Reader, String> {
    let read = panics::caught(|| Reader::begin(db).map_err(|error| error.to_string()));
    read.unwrap_or_else(Err)
}

fn unreadable(reason: &str) -> Unopened {
    Unopened::Content("unreadable".to_owned(), reason.to_owned())
}

/// Whether an I/O error speaks of the bytes in the file and not of the disk.
fn is_content(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof)
}

impl<E: Into<redb::Error>> From<E> for Unopened {
    fn from(error: E) -> Self {
        match error.into() {
            redb::Error::DatabaseAlreadyOpen => Unopened::InUse,
            redb::Error::Io(error) if !is_content(&error) => Unopened::Disk(error.to_string()),
            error @ redb::Error::PreviousIo => Unopened::Disk(error.to_string()),
            error => unreadable(&error.to_string()),
        }
    }
}

pub(crate) const SCHEMA: u64 = 5;
/// Numbers by name.
pub(crate) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
pub(crate) const META_SCHEMA: &str = "schema";
/// In [`META`]: the number of the next series.
const META_NEXT: &str = "next";
/// A [`Series`] by its number, as JSON.
const NAMES: TableDefinition<u32, &[u8]> = TableDefinition::new("names");
/// Level, the beginning of a chunk in Unix seconds, and the number of a series.
type RowKey = (u8, u32, u32);
/// The [`Buckets`] of a series in a chunk.
const ROWS: TableDefinition<RowKey, &[u8]> = TableDefinition::new("rows");

/// Chunks that go for their size at a time, more than come meanwhile: somebody who reads keeps their pages in use.
const TOO_MANY: usize = 4;
const PAGE: u64 = 4096;

/// What is to be stored of one bucket of ten seconds: series and cells.
pub(crate) type Bucket = Vec<(Series, Cell)>;

pub(crate) struct Store {
    db: Arc<Database>,
    /// The same file, for what redb knows nothing of.
    file: File,
    len: u64,
    /// Numbers of series that were written last, and their names.
    known: HashMap<Key, (u32, Series)>,
    /// The bucket that was written last, Unix seconds.
    newest: u32,
    /// Most bytes in use.
    bound: u64,
    keep: [u32; 3],
}

pub(crate) type Cells = BTreeMap<u32, BTreeMap<u32, Cell>>;

pub(crate) fn prepare(db: &Database) -> Result<(), redb::Error> {
    let write = db.begin_write()?;
    write.open_table(META)?.insert(META_SCHEMA, SCHEMA)?;
    write.open_table(NAMES)?;
    write.open_table(ROWS)?;
    write.commit()?;
    Ok(())
}

impl Store {
    /// Goes on with a file that has its tables. One that is far too large for its bound is made shorter.
    pub(crate) fn new(db: Database, file: File, options: &Options) -> Result<Self, redb::Error> {
        let reader = Reader::begin(&db)?;
        let newest = reader.newest()?;
        let known = reader.named_at(newest)?;
        drop(reader);
        let Options { bound, keep, .. } = *options;
        let mut store = Store {
            db: Arc::new(db),
            len: file.metadata()?.len(),
            file,
            known,
            newest,
            bound,
            keep,
        };
        if store.len > 2 * bound {
            while store.drop_one(u32::MAX)? {}
            // Whoever opens it has it alone.
            if let Some(db) = Arc::get_mut(&mut store.db) {
                db.compact()?;
            }
            store.len = store.file.metadata()?.len();
        }
        Ok(store)
    }

    /// Whether the file at `path` is still this one, as long as it was left.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        match (std::fs::metadata(path), self.file.metadata()) {
            (Ok(there), Ok(own)) => {
                Identity::of(&there) == Identity::of(&own) && there.len() == self.len
            }
            (Err(error), _) => error.kind() != std::io::ErrorKind::NotFound,
            // A disk that does not tell will refuse what is written, too.
            (_, Err(_)) => true,
        }
    }

    /// The file, to read from while others write.
    pub(crate) fn db(&self) -> Arc<Database> {
        Arc::clone(&self.db)
    }

    /// Adds buckets of ten seconds, by their beginnings, to all levels; all of it, or on an error nothing. `now` is of the
    /// wall clock, Unix seconds.
    pub(crate) fn add(
        &mut self,
        buckets: &BTreeMap<u32, Bucket>,
        now: u32,
    ) -> Result<(), redb::Error> {
        let Some(newest) = buckets.keys().next_back().copied() else { return Ok(()) };
        let begins = |level: Level| level.chunk(newest) != level.chunk(self.newest);
        let (is_due, is_due_for_names) = (begins(Level::Fine), begins(Level::Coarse));
        let mut left = if is_due { TOO_MANY } else { 0 };
        while left > 0 && self.drop_one(now)? {
            left -= 1;
        }
        let mut known: HashMap<Key, (u32, Series)> = HashMap::new();
        let mut added: BTreeMap<(Level, u32, u32), Buckets> = BTreeMap::new();
        let write = self.db.begin_write()?;
        {
            let mut meta = write.open_table(META)?;
            let mut names = write.open_table(NAMES)?;
            let mut next = meta.get(META_NEXT)?.map_or(0, |next| next.value());
            for (second, cells) in buckets {
                for (series, cell) in cells {
                    let before = known.get(&series.key).or_else(|| self.known.get(&series.key));
                    let (number, is_named) = match before {
                        Some((number, named)) => (*number, named == series),
                        None => {
                            next += 1;
                            (u32::try_from(next).unwrap_or(u32::MAX), false)
                        }
                    };
                    if !is_named {
                        names.insert(
                            number,
                            serde_json::to_vec(series).unwrap_or_default().as_slice(),
                        )?;
                    }
                    known.insert(series.key.clone(), (number, series.clone()));
                    for level in Level::ALL {
                        let start = level.chunk(*second);
                        let at = (second - start) / level.step_seconds();
                        add(added.entry((level, start, number)).or_default(), level, at, cell);
                    }
                }
            }
            meta.insert(META_NEXT, next)?;
            let mut rows = write.open_table(ROWS)?;
            for ((level, start, number), added) in added {
                let key = (level as u8, start, number);
                // What is damaged is left out; redb's checksums make that another version's doing.
                let before = rows.get(key)?.and_then(|row| row::decode(level, row.value()));
                let mut all = before.unwrap_or_default();
                added.iter().for_each(|(at, cell)| add(&mut all, level, *at, cell));
                rows.insert(key, row::encode(&all).as_slice())?;
            }
            for level in Level::ALL.into_iter().filter(|_| is_due) {
                let kept = self.keep[level as usize].saturating_add(level.chunk_seconds());
                let until = now.saturating_sub(kept);
                rows.retain_in(keys(level, 0, until), |_, _| false)?;
            }
            if is_due_for_names {
                // A name goes with its last bucket: dead ones would take the place of what is kept. Each series that has
                // any bucket has one of the coarsest.
                let mut held: HashSet<u32> = known.values().map(|(number, _)| *number).collect();
                for row in rows.range(keys(Level::Coarse, 0, u32::MAX))? {
                    held.insert(row?.0.value().2);
                }
                names.retain(|number, _| held.contains(&number))?;
            }
        }
        write.commit()?;
        (self.known, self.newest) = (known, newest);
        self.len = self.file.metadata().map_or(self.len, |file| file.len());
        Ok(())
    }

    /// If more is in use than may be, drops the oldest chunk of the finest level that has more than its floor; where none
    /// has, of the coarsest that there is.
    fn drop_one(&mut self, now: u32) -> Result<bool, redb::Error> {
        let write = self.db.begin_write()?;
        let mut oldest_chunk = None;
        // What a transaction changes is written to new pages: with some to spare the file need not grow for it.
        if write.stats()?.allocated_pages() > (self.bound - self.bound / 16) / PAGE {
            let rows = write.open_table(ROWS)?;
            for level in Level::ALL {
                let Some(first) = oldest(&rows, level)? else { continue };
                oldest_chunk = Some(keys(level, first, first));
                if now.saturating_sub(first) >= level.floor_seconds() {
                    break;
                }
            }
        }
        let Some(chunk) = oldest_chunk else {
            write.abort()?;
            return Ok(false);
        };
        write.open_table(ROWS)?.retain_in(chunk, |_, _| false)?;
        write.commit()?;
        // Pages of a transaction are free after the next one.
        self.db.begin_write()?.commit()?;
        Ok(true)
    }
}

fn add(buckets: &mut Buckets, level: Level, at: u32, cell: &Cell) {
    buckets.entry(at).and_modify(|before| before.add(level, cell)).or_insert(*cell);
}

/// Rows of the chunks that begin from one second to another.
fn keys(level: Level, from: u32, until: u32) -> std::ops::RangeInclusive<RowKey> {
    (level as u8, from, 0)..=(level as u8, until, u32::MAX)
}

fn oldest(
    rows: &impl ReadableTable<RowKey, &'static [u8]>,
    level: Level,
) -> Result<Option<u32>, redb::Error> {
    let first = rows.range(keys(level, 0, u32::MAX))?.next().transpose()?;
    Ok(first.map(|row| row.0.value().1))
}

/// The file as it was at one moment.
pub(crate) struct Reader(ReadTransaction);

impl Reader {
    pub(crate) fn begin(db: &Database) -> Result<Self, redb::Error> {
        Ok(Reader(db.begin_read()?))
    }

    pub(crate) fn names(&self, mut visit: impl FnMut(u32, Series)) -> Result<(), redb::Error> {
        for entry in self.0.open_table(NAMES)?.iter()? {
            let (number, bytes) = entry?;
            if let Ok(series) = serde_json::from_slice(bytes.value()) {
                visit(number.value(), series);
            }
        }
        Ok(())
    }

    /// The beginning of the newest chunk of the finest level.
    fn newest(&self) -> Result<u32, redb::Error> {
        let rows = self.0.open_table(ROWS)?;
        let last = rows.range(keys(Level::Fine, 0, u32::MAX))?.next_back().transpose()?;
        Ok(last.map_or(0, |row| row.0.value().1))
    }

    /// Series of which a chunk of the finest level has something.
    fn named_at(&self, start: u32) -> Result<HashMap<Key, (u32, Series)>, redb::Error> {
        let (rows, names) = (self.0.open_table(ROWS)?, self.0.open_table(NAMES)?);
        let mut known = HashMap::new();
        for row in rows.range(keys(Level::Fine, start, start))? {
            let number = row?.0.value().2;
            let name = names.get(number)?;
            let series = name.and_then(|name| serde_json::from_slice::<Series>(name.value()).ok());
            known.extend(series.map(|series| (series.key.clone(), (number, series))));
        }
        Ok(known)
    }

    pub(crate) fn oldest_bucket(&self, level: Level) -> Result<Option<u32>, redb::Error> {
        let rows = self.0.open_table(ROWS)?;
        let Some(start) = oldest(&rows, level)? else { return Ok(None) };
        let mut first: Option<u32> = None;
        for row in rows.range(keys(level, start, start))? {
            let buckets = row::decode(level, row?.1.value());
            let at = buckets.and_then(|buckets| buckets.first_key_value().map(|(at, _)| *at));
            first = first.into_iter().chain(at).min();
        }
        Ok(first.map(|at| start + at * level.step_seconds()))
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
        let mut found = Cells::new();
        for row in self.0.open_table(ROWS)?.range(keys(level, level.chunk(from), until))? {
            let (key, row) = row?;
            let (_, start, number) = key.value();
            if !wanted(number) {
                continue;
            }
            let second = |at: u32| start + at * level.step_seconds();
            let buckets = row::decode(level, row.value()).unwrap_or_default().into_iter();
            let buckets = buckets.map(|(at, cell)| (second(at), cell));
            let cells = found.entry(number).or_default();
            let before = cells.len();
            cells.extend(buckets.filter(|(second, _)| (from..=until).contains(second)));
            count += cells.len() - before;
            if count > most {
                return Ok(None);
            }
        }
        Ok(Some(found))
    }
}

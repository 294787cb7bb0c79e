//! The redb file behind the ledger: opening it whatever state it is in, and committing.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fmt, io};

use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition,
    TableError, WriteTransaction,
};
use tessera_config::file::last_good_path;
use tessera_model::audit::Event;
use tessera_model::health::Remembered;
use tessera_model::record::Record;
use tessera_model::steered::Cordon;
use tessera_system::{files, panics};

use super::{
    ALLOCATIONS, CORDONS, Change, HEALTH, HISTORY, INCIDENTS, Lines, META, META_GENERATION,
    META_SCHEMA, SCHEMA, Trail, history,
};

/// The ledger is a few hundred KiB at most; redb's default cache would be a gigabyte.
const CACHE_BYTES: usize = 256 << 10;

/// The open ledger. Blocking: call it where that is allowed.
pub struct Ledger {
    path: PathBuf,
    fsync: bool,
    /// For good: the file is the next plugin's.
    is_closed: bool,
    /// `None` after a failed commit, until the next one opens it again.
    db: Option<Database>,
    listener: Option<Listener>,
    commits: Arc<Commits>,
}

#[derive(Debug, Default)]
pub struct Commits {
    done: AtomicU64,
    failed: AtomicU64,
}

impl Commits {
    fn count(&self, done: bool) {
        let counter = if done { &self.done } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Those that were written, and those that were not.
    pub fn counts(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }
}

/// What says, before the file is opened, that its contents are lost. An empty file is what is left of one by
/// a full disk or by somebody's hand; a plugin itself leaves none. Where there is no file, the last good
/// configuration beside it tells that a plugin has run with it.
fn lost(path: &Path) -> Option<&'static str> {
    match std::fs::metadata(path) {
        Ok(meta) => (meta.is_file() && meta.len() == 0).then_some("is empty"),
        Err(_) => last_good_path(path).exists().then_some("is gone, and a plugin has run with it"),
    }
}

/// Is given each line of the audit trail after it was written. It must not wait: the ledger's lock is held.
pub type Listener = Box<dyn Fn(&Event) + Send + Sync>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    Existing,
    /// There was none, and nothing says that there ever was.
    Created,
    /// What was in it is lost: it is gone, or has nothing in it. A new one was made.
    Lost {
        found: &'static str,
    },
    /// It could not be read, was renamed, and a new one made.
    Rebuilt {
        kept_as: PathBuf,
        reason: String,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "ledger {0} is in use: another Tessera plugin runs on this node; stop it, or give each its \
         own paths.ledger"
    )]
    InUse(PathBuf),
    #[error(
        "ledger {path}: {error}; check that paths.ledger lies on a writable disk with free space"
    )]
    Io { path: PathBuf, error: String },
}

#[derive(Debug, thiserror::Error)]
#[error(
    "cannot write the ledger {path}: {error}; free space on its disk (running pods are not \
     affected, nothing new was granted)"
)]
pub struct CommitError {
    path: PathBuf,
    error: String,
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Ledger {
    /// Opens or makes the file. One that cannot be read is renamed beside it, never deleted.
    pub fn open(path: &Path, fsync: bool) -> Result<(Self, Opened), OpenError> {
        let io_error = |error: String| OpenError::Io { path: path.to_owned(), error };
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(|error| io_error(error.to_string()))?;
        }
        // Also a directory would be taken for a damaged ledger, and moved.
        files::file_or_nothing(path).map_err(|error| io_error(error.to_string()))?;
        let existed = path.exists();
        let lost = lost(path);
        let mut ledger = Ledger {
            path: path.to_owned(),
            fsync,
            is_closed: false,
            db: None,
            listener: None,
            commits: Arc::default(),
        };
        let unreadable = match ledger.try_read() {
            Ok(()) => {
                let opened = match lost {
                    Some(found) => Opened::Lost { found },
                    None if existed => Opened::Existing,
                    None => Opened::Created,
                };
                return Ok((ledger, opened));
            }
            Err(Unopened::InUse) => return Err(OpenError::InUse(path.to_owned())),
            Err(Unopened::Disk(error)) => return Err(io_error(error)),
            Err(Unopened::Unreadable(reason)) => reason,
        };
        let kept_as = keep_aside(path).map_err(|error| {
            io_error(format!("unreadable ({unreadable}) and cannot be renamed: {error}"))
        })?;
        ledger.db().map_err(|error| io_error(error.to_string()))?;
        Ok((ledger, Opened::Rebuilt { kept_as, reason: unreadable }))
    }

    /// All records, and the highest generation ever given out. A record that cannot be decoded is
    /// left out and returned as an error text: its pages, if any, will be adopted.
    pub fn load(&mut self) -> Result<(Vec<Record>, u64, Vec<String>), CommitError> {
        self.reading(records)
    }

    pub fn cordons(&mut self) -> Result<BTreeMap<String, Cordon>, CommitError> {
        // Better cordoned for a reason that nobody can read than given out.
        let unreadable = || Cordon {
            at_unix_ms: 0,
            by: tessera_model::audit::Actor::Plugin,
            reason: Some("the ledger's entry cannot be read".to_owned()),
        };
        self.reading(|db| by_uuid(db, CORDONS, unreadable))
    }

    /// What is known of GPUs' trouble, by UUID. What cannot be read is not sold: `unreadable` says how it stands.
    pub fn health(
        &mut self,
        unreadable: impl Fn() -> Remembered,
    ) -> Result<BTreeMap<String, Remembered>, CommitError> {
        self.reading(|db| by_uuid(db, HEALTH, unreadable))
    }

    pub fn lines(&mut self) -> Result<Lines, CommitError> {
        self.reading(|db| trail(db)?.read())
    }

    /// The history as it is now, to be read while others write. What is read of it after
    /// [`Ledger::close`] fails.
    pub fn trail(&mut self) -> Result<Trail, CommitError> {
        self.reading(trail)
    }

    fn reading<T>(
        &mut self,
        read: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, CommitError> {
        let result = self.db().map_err(Unopened::into_redb).and_then(read);
        result.map_err(|error| self.failed(&error))
    }

    /// Writes a change as one transaction, on disk before it returns if `fsync` is on.
    ///
    /// Errors: The disk is full or broken. The ledger is opened again at the next call.
    pub fn commit(&mut self, change: &Change) -> Result<(), CommitError> {
        let result = self.write(change);
        self.commits.count(result.is_ok());
        result.map_err(|error| self.failed(&error))?;
        if let Some(listener) = &self.listener {
            change.events.iter().for_each(listener);
        }
        Ok(())
    }

    /// From now on `listener` is given each line of the audit trail that is written.
    pub fn set_listener(&mut self, listener: Listener) {
        self.listener = Some(listener);
    }

    /// How many there were; to be asked without waiting for the disk.
    pub fn commits(&self) -> Arc<Commits> {
        Arc::clone(&self.commits)
    }

    /// Lets go of the file, for the next plugin. Nothing can be read or written any more.
    pub fn close(&mut self) {
        (self.db, self.is_closed) = (None, true);
    }

    pub fn failed(&mut self, error: &dyn fmt::Display) -> CommitError {
        // redb refuses everything after an I/O error until it is opened again.
        self.db = None;
        CommitError { path: self.path.clone(), error: error.to_string() }
    }

    fn db(&mut self) -> Result<&Database, Unopened> {
        if self.db.is_none() {
            self.db = Some(self.try_open()?);
        }
        self.db.as_ref().ok_or(Unopened::InUse)
    }

    /// Opens it and reads all of it. redb is meant to report damage, and sometimes panics instead (found
    /// by fuzzing). If it does so later, when the file is damaged under a running plugin, that ends the
    /// process, and the next start finds the damage here.
    fn try_read(&mut self) -> Result<(), Unopened> {
        let read = panics::caught(|| {
            let db = self.db()?;
            records(db)?;
            trail(db)?.touch()?;
            Ok(())
        });
        let result = read.unwrap_or_else(|message| {
            Err(Unopened::Unreadable(format!("its reader panicked: {message}")))
        });
        if result.is_err() {
            let db = self.db.take();
            // Closing writes to the file, too.
            let _ = panics::caught(|| drop(db));
        }
        result
    }

    fn try_open(&self) -> Result<Database, Unopened> {
        let mut db = self.open_file()?;
        // Checks every page against its checksum now: a damaged one would end the process later. What redb could repair,
        // it has repaired: at most the newest commit is gone, and pods that started in it are adopted from their pages.
        let _is_unharmed: bool = db.check_integrity()?;
        prepare(&db)?;
        Ok(db)
    }

    fn open_file(&self) -> Result<Database, DatabaseError> {
        if self.is_closed {
            return Err(DatabaseError::DatabaseAlreadyOpen);
        }
        let file = files::open_private(&self.path)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => DatabaseError::DatabaseAlreadyOpen,
            TryLockError::Error(error) => error.into(),
        })?;
        builder().create_with_backend(Backend { file, fsync: self.fsync })
    }

    fn write(&mut self, change: &Change) -> Result<(), redb::Error> {
        let write = self.db().map_err(Unopened::into_redb)?.begin_write()?;
        {
            let mut allocations = write.open_table(ALLOCATIONS)?;
            let mut meta = write.open_table(META)?;
            let mut generation = meta.get(META_GENERATION)?.map_or(0, |n| n.value());
            for id in &change.remove {
                allocations.remove(id.as_str())?;
            }
            for record in &change.put {
                allocations.insert(record.id.as_str(), encode(record)?.as_slice())?;
                generation = generation.max(record.generation);
            }
            meta.insert(META_GENERATION, generation)?;
        }
        write_by_uuid(&write, CORDONS, &change.cordons)?;
        write_by_uuid(&write, HEALTH, &change.health)?;
        history::append(&write, &change.events)?;
        write.commit()?;
        Ok(())
    }
}

fn records(db: &Database) -> Result<(Vec<Record>, u64, Vec<String>), redb::Error> {
    let read = db.begin_read()?;
    let (mut records, mut broken) = (Vec::new(), Vec::new());
    for entry in read.open_table(ALLOCATIONS)?.iter()? {
        let (id, value) = entry?;
        match serde_json::from_slice::<Record>(value.value()) {
            Ok(record) if record.id.as_str() == id.value() => records.push(record),
            Ok(_) => broken.push(format!("record {} names another allocation", id.value())),
            Err(error) => broken.push(format!("record {}: {error}", id.value())),
        }
    }
    let generation = read.open_table(META)?.get(META_GENERATION)?.map_or(0, |n| n.value());
    Ok((records, generation, broken))
}

fn trail(db: &Database) -> Result<Trail, redb::Error> {
    Ok(Trail(db.begin_read()?))
}

/// A table of JSON by UUID, which older versions do not make.
fn by_uuid<T: serde::de::DeserializeOwned>(
    db: &Database,
    table: TableDefinition<&str, &[u8]>,
    unreadable: impl Fn() -> T,
) -> Result<BTreeMap<String, T>, redb::Error> {
    let table = match db.begin_read()?.open_table(table) {
        // Nothing ever was.
        Err(TableError::TableDoesNotExist(_)) => return Ok(BTreeMap::new()),
        table => table?,
    };
    let mut all = BTreeMap::new();
    for entry in table.iter()? {
        let (uuid, value) = entry?;
        let one = serde_json::from_slice(value.value()).unwrap_or_else(|_| unreadable());
        all.insert(uuid.value().to_owned(), one);
    }
    Ok(all)
}

fn write_by_uuid<T: serde::Serialize>(
    write: &WriteTransaction,
    table: TableDefinition<&str, &[u8]>,
    entries: &[(String, Option<T>)],
) -> Result<(), redb::Error> {
    if entries.is_empty() {
        return Ok(());
    }
    let mut table = write.open_table(table)?;
    for (uuid, entry) in entries {
        match entry {
            Some(entry) => table.insert(uuid.as_str(), encode(entry)?.as_slice())?,
            None => table.remove(uuid.as_str())?,
        };
    }
    Ok(())
}

fn builder() -> redb::Builder {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

pub(super) fn encode(value: &impl serde::Serialize) -> Result<Vec<u8>, redb::Error> {
    serde_json::to_vec(value).map_err(|error| io_error(error.to_string()))
}

fn io_error(message: String) -> redb::Error {
    redb::Error::Io(io::Error::other(message))
}

fn prepare(db: &Database) -> Result<(), Unopened> {
    match db.begin_read()?.open_table(META) {
        Ok(meta) => {
            let found = meta.get(META_SCHEMA)?.map_or(0, |n| n.value());
            if found != SCHEMA {
                let reason = format!("schema {found}, this version reads {SCHEMA}");
                return Err(Unopened::Unreadable(reason));
            }
        }
        Err(TableError::TableDoesNotExist(_)) => {
            let write = db.begin_write()?;
            write.open_table(META)?.insert(META_SCHEMA, SCHEMA)?;
            write.open_table(ALLOCATIONS)?;
            write.open_table(HISTORY)?;
            write.open_table(INCIDENTS)?;
            write.commit()?;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Renames an unreadable file to a name that says when, and that nothing else has.
fn keep_aside(path: &Path) -> io::Result<PathBuf> {
    let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let aside = path.with_file_name(format!("{name}.unreadable-{nanoseconds}"));
    std::fs::rename(path, &aside)?;
    Ok(aside)
}

enum Unopened {
    InUse,
    Unreadable(String),
    Disk(String),
}

impl Unopened {
    fn into_redb(self) -> redb::Error {
        match self {
            Unopened::InUse => redb::Error::DatabaseAlreadyOpen,
            other => io_error(other.to_string()),
        }
    }
}

/// Whether an I/O error speaks of the bytes in the file and not of the disk.
fn is_content(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof)
}

impl fmt::Display for Unopened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unopened::InUse => f.write_str("in use by another process"),
            Unopened::Unreadable(text) | Unopened::Disk(text) => f.write_str(text),
        }
    }
}

impl<E: Into<redb::Error>> From<E> for Unopened {
    fn from(error: E) -> Self {
        let error = error.into();
        let text = error.to_string();
        match error {
            redb::Error::DatabaseAlreadyOpen => Unopened::InUse,
            redb::Error::Io(io) if !is_content(&io) => Unopened::Disk(text),
            redb::Error::PreviousIo => Unopened::Disk(text),
            _ => Unopened::Unreadable(text),
        }
    }
}

/// A file that was locked when it was opened. redb's own way to leave out the wait for the disk (`Durability::None`) keeps
/// commits in the process, and a SIGKILL would lose all since the start. Without `fsync` they are written all the same,
/// where the kernel has them whatever becomes of the process; only a power cut may lose the newest.
#[derive(Debug)]
struct Backend {
    file: File,
    fsync: bool,
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
        if self.fsync { self.file.sync_data() } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    fn close(&self) -> io::Result<()> {
        // A reader of the trail may have the file open still.
        self.file.unlock()
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

//! Opening the file whatever state it is in. Nothing that another version wrote is lost, and nothing that lies there
//! ends the process.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use redb::{Database, ReadableDatabase, StorageBackend, TableError};
use tessera_system::{files, panics};

use super::store::{META, META_SCHEMA, Reader, SCHEMA, Store, prepare};

/// redb's default would be a gigabyte.
const CACHE_BYTES: usize = 256 << 10;
/// Bytes that stay free on the disk for the ledger, which lies beside the file and without which no pod starts.
const LEDGERS: u64 = 16 << 20;

/// How the file is kept.
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

/// How the file was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// As it was left.
    Existing,
    /// There was none.
    Created,
    /// It was put aside, and this one made.
    Aside {
        /// Where the other is.
        kept_as: PathBuf,
        reason: String,
    },
}

/// Why nothing could be stored. What was to be stored waits for half an hour.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    /// Another process has the file.
    #[error("history {0} is in use by another process; nothing is recorded until that ends")]
    InUse(PathBuf),
    /// The disk or the directory refuses.
    #[error(
        "history {path}: {error}; nothing is recorded. Free space on the disk, make the directory of paths.ledger \
         writable, or set history.enabled = false"
    )]
    Unopened { path: PathBuf, error: String },
    /// It could not be written. It is opened again the next time.
    #[error("history {path} cannot be written: {error}; it is tried again every minute")]
    Unwritten { path: PathBuf, error: String },
}

/// Why a database did not open.
enum Unopened {
    InUse,
    /// The file's content is the reason: what it is kept as, and why.
    Content(String, String),
    Disk(String),
}

/// Opens the file, or makes it. Blocking.
pub(crate) fn open(options: &Options) -> Result<(Store, Found), FlushError> {
    let path = &options.path;
    find(options).map_err(|unopened| match unopened {
        Unopened::InUse => FlushError::InUse(path.clone()),
        Unopened::Content(_, error) | Unopened::Disk(error) => {
            FlushError::Unopened { path: path.clone(), error }
        }
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
}

fn database(options: &Options) -> Result<(Database, File), Unopened> {
    let file = files::open_private(&options.path)?;
    // As long as any of its descriptors is open.
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

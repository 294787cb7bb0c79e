//! Opening the file whatever state it is in. Nothing that a newer version wrote is lost, and nothing that lies there
//! ends the process.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::backends::FileBackend;
use redb::{Database, ReadableDatabase, TableError};

use super::backend::{Bounded, Extent};
use super::room;
use super::store::{META, META_BOUND, META_SCHEMA, Reader, SCHEMA, Store, UPGRADED, prepare};
use tessera_system::noted::{Lost, Noted};
use tessera_system::{files, panics};

/// redb's default would be a gigabyte.
const CACHE_BYTES: usize = 256 << 10;

/// How the file is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub path: PathBuf,
    /// Most bytes that it may have.
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
    /// It was made for another bound; what fits is there.
    Resized,
    /// It was damaged, and is as it was some time before.
    Older(Lost),
    /// The one that was in use had been removed, or another had taken its place. How what is there now was found.
    Replaced(Box<Found>),
    /// It was put aside, and this one made, or taken back.
    Aside {
        /// Where the other is.
        kept_as: PathBuf,
        reason: String,
    },
}

/// Why there is no file for now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// Another process has it.
    #[error("history {0} is in use by another process; nothing is recorded until that ends")]
    InUse(PathBuf),
    /// The disk or the directory refuses.
    #[error(
        "history {path}: {error}; nothing is recorded. Free space on the disk, make the directory of paths.ledger \
         writable, or set history.enabled = false"
    )]
    Io { path: PathBuf, error: String },
}

/// Opens the file, or makes it. Blocking.
///
/// # Errors
/// Another process has it, or the disk refuses.
pub(crate) fn open(options: &Options) -> Result<(Store, Found), Trouble> {
    let path = &options.path;
    let io_error = |error: &dyn std::fmt::Display| Trouble::Io {
        path: path.clone(),
        error: error.to_string(),
    };
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(|error| io_error(&error))?;
    }
    files::file_or_nothing(path).map_err(|error| io_error(&error))?;
    let is_there = std::fs::metadata(path).is_ok_and(|meta| meta.len() > 0);
    if !is_there {
        return create(options).map(|store| (store, Found::Created));
    }
    let (kept_as, reason) = match look(options) {
        Ok((store, lost)) => {
            let (store, found) = fit(store, options)?;
            return Ok((store, lost.map_or(found, Found::Older)));
        }
        Err(Unopened::InUse) => return Err(Trouble::InUse(path.clone())),
        Err(Unopened::Disk(error)) => return Err(io_error(&error)),
        Err(Unopened::Schema(other)) => {
            let aside = beside(path, &format!("schema-{other}"));
            let reason =
                format!("version {other} of Tessera's history wrote it, this one reads {SCHEMA}");
            (aside, reason)
        }
        Err(Unopened::Unreadable(reason)) => (beside(path, "unreadable"), reason),
    };
    std::fs::rename(path, &kept_as).map_err(|error| {
        io_error(&format!("{reason}, and it cannot be renamed to {}: {error}", kept_as.display()))
    })?;
    let found = |reason| Found::Aside { kept_as, reason };
    // What this version left when another took over.
    let ours = left_aside(path);
    if ours.is_file() && std::fs::rename(&ours, path).is_ok() {
        match look(options) {
            Ok((store, lost)) => {
                let (store, _) = fit(store, options)?;
                let lost = lost.map(|lost| format!("; of this version's own, {lost}"));
                return Ok((store, found(reason + &lost.unwrap_or_default())));
            }
            Err(Unopened::InUse) => return Err(Trouble::InUse(path.clone())),
            Err(Unopened::Disk(error)) => return Err(io_error(&error)),
            Err(_) => {
                std::fs::rename(path, beside(path, "unreadable"))
                    .map_err(|error| io_error(&error))?;
            }
        }
    }
    create(options).map(|store| (store, found(reason)))
}

/// Where another version leaves what this one wrote.
fn left_aside(path: &Path) -> PathBuf {
    beside(path, &format!("schema-{SCHEMA}"))
}

fn beside(path: &Path, what: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{name}.{what}"))
}

/// A new file, made beside its place: one of which a kill left half is never taken for whole.
fn create(options: &Options) -> Result<Store, Trouble> {
    let (path, new) = (&options.path, beside(&options.path, "new"));
    let make = || -> Result<Store, Unopened> {
        let store = begin(&new, options)?;
        std::fs::rename(&new, path).map_err(|error| Unopened::Disk(error.to_string()))?;
        Ok(store)
    };
    guarded(make).map_err(|unopened| trouble(unopened, path))
}

fn begin(new: &Path, options: &Options) -> Result<Store, Unopened> {
    files::file_or_nothing(new).map_err(|error| Unopened::Disk(error.to_string()))?;
    // What a kill left of an earlier one holds pages of the disk.
    let _ = std::fs::remove_file(new);
    let dir = new.parent().unwrap_or(Path::new("."));
    room::on_disk(dir, options.bound).map_err(Unopened::Disk)?;
    let extent = Extent::new(options.bound);
    let made = || -> Result<Store, Unopened> {
        let file = open_file(new)?;
        let db = database(&file, &extent, options)?;
        prepare(&db, &extent).map_err(|error| Unopened::of(&error))?;
        Store::new(Arc::new(db), file, Arc::clone(&extent), options.keep)
            .map_err(|error| Unopened::of(&error))
    };
    let made = made();
    if matches!(made, Err(Unopened::Disk(_) | Unopened::Unreadable(_))) {
        // A full disk needs its pages back.
        let _ = std::fs::remove_file(new);
    }
    made
}

fn open_file(path: &Path) -> Result<File, Unopened> {
    files::open_private(path).map_err(|error| Unopened::Disk(error.to_string()))
}

fn database(file: &File, extent: &Arc<Extent>, options: &Options) -> Result<Database, Unopened> {
    let file = FileBackend::new(file.try_clone().map_err(redb::Error::from)?)?;
    let backend = Bounded::new(file, Arc::clone(extent), options.sync)
        .map_err(|error| Unopened::Disk(error.to_string()))?;
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    Ok(builder.create_with_backend(backend)?)
}

/// Opens a file that is there, and reads all of it once; also what of it was lost.
fn look(options: &Options) -> Result<(Store, Option<Lost>), Unopened> {
    guarded(|| {
        let file = open_file(&options.path)?;
        let noted = Noted::read(&file);
        let extent = Extent::new(options.bound);
        let mut db = database(&file, &extent, options)?;
        // Whether it repaired something says not what that took: redb has gone back when it was opened, or here.
        let _is_unharmed: bool = db.check_integrity()?;
        let found = match db.begin_read().map_err(redb::Error::from)?.open_table(META) {
            Ok(meta) => meta.get(META_SCHEMA)?.map_or(0, |found| found.value()),
            Err(TableError::TableDoesNotExist(_)) => {
                return Err(Unopened::Unreadable("it is another program's".to_owned()));
            }
            Err(error) => return Err(Unopened::of(&error.into())),
        };
        // What this version left when an older one took over goes before what that one has recorded since.
        let may_upgrade = UPGRADED.contains(&found) && !left_aside(&options.path).is_file();
        match found {
            SCHEMA => {}
            _ if may_upgrade => upgrade(&db)?,
            other => return Err(Unopened::Schema(other)),
        }
        let lost = Reader::begin(&db)?.noted()?.lost(noted);
        Ok((Store::new(Arc::new(db), file, extent, options.keep)?, lost))
    })
}

/// Goes on in an older version's tables. Its rows are read as they are.
fn upgrade(db: &Database) -> Result<(), Unopened> {
    let write = db.begin_write()?;
    write.open_table(META)?.insert(META_SCHEMA, SCHEMA)?;
    write.commit()?;
    Ok(())
}

/// redb is meant to report damage, and sometimes panics instead.
fn guarded<T>(work: impl FnOnce() -> Result<T, Unopened>) -> Result<T, Unopened> {
    let done = panics::caught(work);
    done.unwrap_or_else(|message| {
        Err(Unopened::Unreadable(format!("its reader panicked: {message}")))
    })
}

/// Makes a file that was made for another bound as large as this one allows.
fn fit(mut store: Store, options: &Options) -> Result<(Store, Found), Trouble> {
    let path = &options.path;
    let work = || -> Result<(Store, Found), Unopened> {
        let bound = {
            let meta = store.db().begin_read().map_err(redb::Error::from)?.open_table(META)?;
            meta.get(META_BOUND)?.map_or(0, |bound| bound.value())
        };
        if bound == options.bound && store.extent().len() <= options.bound {
            return Ok((store, Found::Existing));
        }
        let len = store.extent().len();
        if len > options.bound {
            store.shrink()?;
        }
        let dir = path.parent().unwrap_or(Path::new("."));
        room::on_disk(dir, options.bound.saturating_sub(len)).map_err(Unopened::Disk)?;
        let db = store.db();
        room::take(&db, store.extent())?;
        let write = db.begin_write()?;
        write.open_table(META)?.insert(META_BOUND, options.bound)?;
        write.commit()?;
        Ok((store, Found::Resized))
    };
    guarded(work).map_err(|unopened| trouble(unopened, path))
}

/// The whole of a file can be read.
pub(crate) fn read(db: &Database) -> Result<Reader, String> {
    let read = panics::caught(|| Reader::begin(db).map_err(|error| error.to_string()));
    read.unwrap_or_else(Err)
}

fn trouble(unopened: Unopened, path: &Path) -> Trouble {
    match unopened {
        Unopened::InUse => Trouble::InUse(path.to_owned()),
        other => Trouble::Io { path: path.to_owned(), error: other.text() },
    }
}

/// Why a database did not open.
enum Unopened {
    InUse,
    Schema(u64),
    Unreadable(String),
    Disk(String),
}

impl Unopened {
    fn of(error: &redb::Error) -> Self {
        match error {
            redb::Error::DatabaseAlreadyOpen => Unopened::InUse,
            redb::Error::Io(io) if !is_content(io) => Unopened::Disk(error.to_string()),
            redb::Error::PreviousIo => Unopened::Disk(error.to_string()),
            _ => Unopened::Unreadable(error.to_string()),
        }
    }

    fn text(self) -> String {
        match self {
            Unopened::InUse => "it is in use by another process".to_owned(),
            Unopened::Schema(other) => {
                format!("version {other} of Tessera's history wrote it, this one reads {SCHEMA}")
            }
            Unopened::Unreadable(text) | Unopened::Disk(text) => text,
        }
    }
}

/// Whether an I/O error speaks of the bytes in the file and not of the disk.
fn is_content(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof)
}

impl<E: Into<redb::Error>> From<E> for Unopened {
    fn from(error: E) -> Self {
        Unopened::of(&error.into())
    }
}

//! Names of the sockets, and how they are made and removed.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tessera_system::files::{self, Dir, SocketFile};
use tokio::net::UnixListener;
use tracing::info;

use crate::names;

/// Bytes that fit into `sockaddr_un.sun_path` with its NUL (unix(7)). Kubelet has the same limit.
const MAX_PATH: usize = 107;

/// Why the sockets cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error(
        "kubelet's plugin registry {0} does not exist: is kubelet's root directory another one \
         (--root-dir), or is the directory not mounted into this container?"
    )]
    NoRegistry(PathBuf),
    /// The driver's directory cannot be made.
    #[error("cannot make the DRA driver's directory {path}: {source}")]
    NoDirectory { path: PathBuf, source: io::Error },
    /// The path would not fit into a socket address.
    #[error("the socket path {0} is longer than {MAX_PATH} bytes: use a shorter directory")]
    TooLong(PathBuf),
    #[error(
        "another instance of the DRA driver serves at {0}: end it first, or give each the UID of its pod \
         (POD_UID), so that they can run side by side"
    )]
    Taken(PathBuf),
    #[error("cannot listen on {path}: {source}")]
    Listen { path: PathBuf, source: io::Error },
}

/// Where an instance of the driver listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Paths {
    pub(super) registrar: PathBuf,
    pub(super) dra: PathBuf,
}

impl Paths {
    /// Of the instance in the pod of this UID; of the only one, where it is not known.
    pub(super) fn new(
        registry: &Path,
        dir: &Path,
        pod_uid: Option<&str>,
    ) -> Result<Self, SocketError> {
        let driver = names::DRIVER;
        let pod_uid = pod_uid.filter(|uid| !uid.is_empty());
        let Some(uid) = pod_uid else {
            return Ok(Paths {
                registrar: fits(registry.join(format!("{driver}-reg.sock")))?,
                dra: fits(dir.join("dra.sock"))?,
            });
        };
        let hash = || -> String {
            Sha256::digest(uid)[..6].iter().map(|byte| format!("{byte:02x}")).collect()
        };
        let plain = uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let named = |make: &dyn Fn(&str) -> PathBuf| {
            let path = make(uid);
            if plain && path.as_os_str().len() <= MAX_PATH { Ok(path) } else { fits(make(&hash())) }
        };
        Ok(Paths {
            registrar: named(&|uid| registry.join(format!("{driver}-{uid}-reg.sock")))?,
            dra: named(&|uid| dir.join(format!("dra-{uid}.sock")))?,
        })
    }

    /// Makes the driver's directory, and removes what dead instances left.
    pub(super) fn prepare(&self) -> Result<(), SocketError> {
        let (Some(registry), Some(dir)) = (self.registrar.parent(), self.dra.parent()) else {
            return Err(SocketError::NoRegistry(self.registrar.clone()));
        };
        if !registry.is_dir() {
            return Err(SocketError::NoRegistry(registry.to_owned()));
        }
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(dir);
        made.map_err(|source| SocketError::NoDirectory { path: dir.to_owned(), source })?;
        let of_registrar =
            |name: &str| name.starts_with(names::DRIVER) && name.ends_with("-reg.sock");
        remove_stale(registry, of_registrar);
        remove_stale(dir, |name| name.starts_with("dra") && name.ends_with(".sock"));
        Ok(())
    }
}

fn fits(path: PathBuf) -> Result<PathBuf, SocketError> {
    if path.as_os_str().len() <= MAX_PATH { Ok(path) } else { Err(SocketError::TooLong(path)) }
}

/// Removes sockets of instances that were killed: kubelet would dial them for ever. One that somebody listens at
/// stays.
fn remove_stale(dir: &Path, is_ours: impl Fn(&str) -> bool) {
    let Ok(dir) = Dir::open_trusted(dir) else { return };
    for name in dir.names().unwrap_or_default() {
        let Some(name) = name.to_str().filter(|name| is_ours(name)) else { continue };
        if files::remove_stale(&dir, OsStr::new(name)).is_ok() {
            info!(socket = name, "removed the socket of an instance that is dead");
        }
    }
}

/// A listening socket; its file is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Socket {
    file: SocketFile,
}

impl Socket {
    /// Listens. Only root may connect.
    pub(super) fn listen(path: &Path) -> Result<(Self, UnixListener), SocketError> {
        let listen = || {
            let (file, listener) = SocketFile::listen(path)?;
            listener.set_nonblocking(true)?;
            Ok((Socket { file }, UnixListener::from_std(listener)?))
        };
        listen().map_err(|source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => SocketError::Taken(path.to_owned()),
            _ => SocketError::Listen { path: path.to_owned(), source },
        })
    }

    /// Whether nothing has its name any more.
    pub(super) fn is_gone(&self) -> bool {
        self.file.is_gone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(registry: &str, dir: &str, uid: Option<&str>) -> Result<[String; 2], SocketError> {
        let Paths { registrar, dra } = Paths::new(Path::new(registry), Path::new(dir), uid)?;
        Ok([registrar, dra].map(|path| path.display().to_string()))
    }

    #[test]
    fn instances_have_sockets_of_their_own_where_their_pods_are_known() {
        let (registry, dir) = ("/k/plugins_registry", "/k/plugins/gpu.tessera.dev");
        assert_eq!(
            paths(registry, dir, None).unwrap(),
            ["/k/plugins_registry/gpu.tessera.dev-reg.sock", "/k/plugins/gpu.tessera.dev/dra.sock"]
        );
        assert_eq!(paths(registry, dir, Some("")).unwrap(), paths(registry, dir, None).unwrap());
        let uid = "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff";
        let [registrar, dra] = paths(registry, dir, Some(uid)).unwrap();
        assert_eq!(registrar, format!("/k/plugins_registry/gpu.tessera.dev-{uid}-reg.sock"));
        assert_eq!(dra, format!("/k/plugins/gpu.tessera.dev/dra-{uid}.sock"));
    }

    #[test]
    fn names_that_would_be_too_long_are_hashed() {
        let uid = "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff";
        let registry = format!("/{}", "r".repeat(60));
        let [one, _] = paths(&registry, "/d", Some(uid)).unwrap();
        let [other, _] =
            paths(&registry, "/d", Some("another-uid-of-the-same-length-as-that")).unwrap();
        assert!(one.len() <= MAX_PATH && other.len() <= MAX_PATH && one != other, "{one} {other}");
        assert!(one.ends_with("-reg.sock") && one.contains("gpu.tessera.dev-"));
        // No UID is a path.
        let [escaped, _] = paths("/r", "/d", Some("../x")).unwrap();
        assert!(!escaped.contains(".."), "{escaped}");
        let error = paths(&"/r".repeat(60), "/d", Some(uid)).unwrap_err();
        assert!(error.to_string().contains("107 bytes"), "{error}");
    }

    #[test]
    fn a_registry_that_is_missing_says_what_to_look_for() {
        let base = tempfile::tempdir().unwrap();
        let paths = Paths::new(&base.path().join("none"), base.path(), None).unwrap();
        let error = paths.prepare().unwrap_err().to_string();
        assert!(error.contains("--root-dir"), "{error}");
    }

    #[tokio::test]
    async fn sockets_of_the_dead_go_and_those_of_the_living_stay() {
        let base = tempfile::tempdir().unwrap();
        let registry = base.path().join("registry");
        let dir = base.path().join("dra");
        std::fs::create_dir_all(&registry).unwrap();
        let of = |uid| Paths::new(&registry, &dir, Some(uid)).unwrap();
        let (dead, living, foreign) = (of("dead"), of("living"), registry.join("csi-reg.sock"));
        dead.prepare().unwrap();
        for path in [&dead.registrar, &dead.dra, &foreign] {
            drop(std::os::unix::net::UnixListener::bind(path).unwrap());
        }
        let _registrar = Socket::listen(&living.registrar).unwrap();
        let _dra = Socket::listen(&living.dra).unwrap();
        of("new").prepare().unwrap();
        assert!(!dead.registrar.exists() && !dead.dra.exists());
        assert!(living.registrar.exists() && living.dra.exists() && foreign.exists());
        let error = Socket::listen(&living.dra).unwrap_err().to_string();
        assert!(error.contains("POD_UID"), "{error}");
    }
}

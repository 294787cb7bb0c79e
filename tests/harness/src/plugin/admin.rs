//! A client of the admin socket.

use std::path::Path;

use tessera_view::change::Target;
use tessera_web::client::Client;

/// A client of the plugin whose files are below `dir`.
pub fn admin(dir: &Path) -> Client {
    Client::at(&dir.join("admin.sock"))
}

/// What a request is about: a pod or an allocation, by its name.
pub fn target(name: &str) -> Target {
    Target { name: name.into(), ..Target::default() }
}

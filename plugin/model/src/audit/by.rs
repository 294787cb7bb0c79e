//! The origin of a line of the audit trail.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Who did it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// Kubelet asked for it.
    Kubelet,
    /// The configuration file.
    Configuration,
    /// The plugin, on its own.
    Plugin,
    /// What the driver said.
    Driver,
    /// A process of the container.
    Tenant,
    /// Somebody, over the admin socket.
    Admin {
        /// Its user, by the socket's peer credentials.
        uid: u32,
        /// Its pid on the host, likewise; 0 where that is in a pid namespace that is not seen from here.
        #[serde(default)]
        pid: u32,
        /// The user who logged in, whatever became of the uid since (`/proc/<pid>/loginuid`); absent for
        /// what no login started.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        login_uid: Option<u32>,
        /// What was asked for, as a command.
        command: String,
    },
}

impl By {
    /// Who, without what was asked for.
    #[must_use]
    pub fn who(&self) -> String {
        match self {
            By::Kubelet => "kubelet".to_owned(),
            By::Configuration => "configuration".to_owned(),
            By::Plugin => "plugin".to_owned(),
            By::Driver => "driver".to_owned(),
            By::Tenant => "container".to_owned(),
            By::Admin { uid, login_uid: Some(login), .. } if login != uid => {
                format!("uid {uid} (logged in as {login})")
            }
            By::Admin { uid, .. } => format!("uid {uid}"),
        }
    }
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.who())?;
        let By::Admin { pid, command, .. } = self else { return Ok(()) };
        if *pid != 0 {
            write!(f, " pid {pid}")?;
        }
        write!(f, ": {command}")
    }
}

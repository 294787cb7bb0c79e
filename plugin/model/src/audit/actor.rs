//! The origin of a line of the audit trail.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Actor {
    Kubelet,
    Configuration,
    Plugin,
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
        /// The uid's name, where the plugin's `/etc/passwd` has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        user: Option<String>,
        /// The login uid's name, likewise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        login: Option<String>,
        /// What was asked for, as a command.
        command: String,
    },
}

impl Actor {
    /// The originator, without the command.
    pub fn who(&self) -> String {
        match self {
            Actor::Kubelet => "kubelet".to_owned(),
            Actor::Configuration => "configuration".to_owned(),
            Actor::Plugin => "plugin".to_owned(),
            Actor::Driver => "driver".to_owned(),
            Actor::Tenant => "container".to_owned(),
            Actor::Admin { uid, login_uid, user, login, .. } => {
                let name = |name: &Option<String>, uid: u32| {
                    name.clone().unwrap_or_else(|| format!("uid {uid}"))
                };
                match login_uid.filter(|login| login != uid) {
                    Some(id) => format!("{} (logged in as {})", name(user, *uid), name(login, id)),
                    None => name(user, *uid),
                }
            }
        }
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.who())?;
        let Actor::Admin { pid, command, .. } = self else { return Ok(()) };
        if *pid != 0 {
            write!(f, " pid {pid}")?;
        }
        write!(f, ": {command}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_called_by_name_where_that_is_known() {
        let who = |user: Option<&str>, login_uid, login: Option<&str>| {
            let (user, login) = (user.map(str::to_owned), login.map(str::to_owned));
            let command = String::new();
            Actor::Admin { uid: 0, pid: 1, login_uid, user, login, command }.who()
        };
        assert_eq!(who(None, None, None), "uid 0");
        assert_eq!(who(Some("root"), None, None), "root");
        assert_eq!(who(Some("root"), Some(0), Some("root")), "root");
        assert_eq!(who(Some("root"), Some(1000), None), "root (logged in as uid 1000)");
        assert_eq!(who(Some("root"), Some(1000), Some("alice")), "root (logged in as alice)");
        // As earlier versions wrote it.
        let old: Actor = serde_json::from_str(r#"{"admin":{"uid":7,"command":"x"}}"#).unwrap();
        assert_eq!(old.who(), "uid 7");
    }
}

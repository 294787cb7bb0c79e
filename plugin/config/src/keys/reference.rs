//! The reference of all keys, as Markdown.

use std::fmt::Write;

use super::keys;

const HEAD: &str = "\
# Configuration

<!-- Written by `tessera config reference`; a test holds the two equal. -->

`tessera serve --config FILE` reads one TOML file; without `--config`, `/etc/tessera/config.toml` counts
where it exists, and the defaults where it does not. [config.toml](../config.toml) is every key with its
default and more words. A key that is left out keeps its default; one that does not exist, or a value
that makes no sense, is an error, and all errors are told at once.

- `tessera config check FILE` tells every error, with line and key, also against this machine's GPUs.
- `tessera config plan FILE` tells what it would change, for the node and for each running allocation.
- `tessera config reload`, SIGHUP, or a change of the file itself: a running plugin reads it again. A bad
  one is refused, and the last good one stays in force, across restarts as well:
  [plugin.md](plugin.md#changing-the-configuration).

**A change takes effect** *at once*: for everybody, as soon as the file is read. *For new pods*: what
runs keeps what it was given until its pod ends. *After a restart* of the plugin: until then the value
before holds, and `tessera status` says so; running pods do not notice the restart.

**Quantities** are Kubernetes': `123Mi`, `129M`, `129e6`, `1.5Gi`, `250m`, or a plain number. **Times**
are written `500ms`, `10s`, `5m`, `1h`. A **percentage** is a string such as `\"25%\"`.
";

/// The whole page.
#[must_use]
pub fn reference() -> String {
    let mut page = HEAD.to_owned();
    let mut section = "";
    for key in keys() {
        let (table, _) = key.name.split_once('.').unwrap_or((key.name, ""));
        if table != section {
            section = table;
            let header = match table.strip_suffix("[]") {
                Some(array) => format!("[[{array}]]"),
                None => format!("[{table}]"),
            };
            // Writing to a string does not fail.
            let _ = write!(
                page,
                "\n## `{header}`\n\n| Key | May be | Default | A change takes effect | Meaning |\n\
                 |---|---|---|---|---|\n"
            );
        }
        let default = key.default().map_or_else(|| "–".to_owned(), |text| format!("`{text}`"));
        let _ = writeln!(
            page,
            "| `{}` | {} | {default} | {} | {} |",
            key.name,
            key.form,
            key.takes.text(),
            key.meaning
        );
    }
    page
}

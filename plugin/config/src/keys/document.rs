//! The documents that follow from the declarations: the reference, as Markdown, and the commented file.

use std::fmt::Write;

use super::{Row, Shown};
use crate::Config;
use crate::table::{Key, Table, plain};
use crate::tables::EXAMPLE;

const HEAD: &str = "\
# Configuration

<!-- Written by `tessera config reference`; a test holds the two equal. -->

`tessera serve --config FILE` reads one TOML file; without `--config`, `/etc/tessera/config.toml` counts
where it exists, and the defaults where it does not. [config.toml](../config.toml) is every key with its
default and more words. A key that is left out keeps its default; one that does not exist, or a value
that makes no sense, is an error.

- `tessera config check FILE` tells every error, with line and key, also against this machine's GPUs.
- `tessera config plan FILE` tells what it would change, for the node and for each running allocation.
- `tessera config reload`, SIGHUP, or a change of the file itself: a running plugin reads it again. A bad
  one is refused, and the last good one stays in force, across restarts as well:
  [plugin.md](plugin.md#changing-the-configuration).

**A change takes effect** *at once*: for everybody, as soon as the file is read. *For new pods*: what
runs keeps what it was given until its pod ends. *After a restart* of the plugin: until then the value
before holds, and `tessera status` says so; running pods do not notice the restart.

**Quantities** are Kubernetes': `123Mi`, `129M`, `129e6`, `1.5Gi`, or a plain number. **Times** are written
`500ms`, `10s`, `5m`, `1h`. A **share** of a GPU's time is a percentage, a string such as `\"25%\"`, here and
wherever people read one; `\"250m\"` and `0.25` GPUs mean the same. In JSON it is a whole number of thousandths of a
GPU (`cores_millis`, `got_1s_millis`), in metrics a part of 1 (`tessera_container_cores_ratio`).

All errors are reported in one go, but for what may only follow from another. `tessera config schema` prints what a
file may say as JSON Schema; the chart's `values.schema.json` is made of it, so that Helm refuses what the plugin would.
";

/// The whole page.
#[must_use]
pub fn reference() -> String {
    let mut page = HEAD.to_owned();
    for section in Config::KEYS {
        let rows = rows(section);
        let header = header(&rows[0], section);
        // Writing to a string does not fail.
        let _ = write!(
            page,
            "\n## `{header}`\n\n{}\n\n| Key | May be | Default | A change takes effect | Meaning |\n\
             |---|---|---|---|---|\n",
            section.doc.join("").trim()
        );
        for Row { key, accepts, default, required, takes, doc } in rows {
            let default = match (default, required) {
                (Some(text), _) => format!("`{text}`"),
                (None, true) => "required".to_owned(),
                (None, false) => "–".to_owned(),
            };
            let _ =
                writeln!(page, "| `{key}` | {accepts} | {default} | {} | {doc} |", takes.text());
        }
    }
    page
}

fn rows(section: &Key<Config>) -> Vec<Row> {
    let mut found = Vec::new();
    let row = Row { key: section.name.to_owned(), ..Row::default() };
    section.field.rows(&Config::default(), row, &mut found);
    found
}

/// `[share]` or `[[layout]]`.
fn header(row: &Row, section: &Key<Config>) -> String {
    match row.key.contains("[]") {
        true => format!("[[{}]]", section.name),
        false => format!("[{}]", section.name),
    }
}

const TOML_HEAD: &str = "\
# Tessera's configuration: every key with its default, written by `tessera config default`. A key that is left
# out keeps its default; a key that does not exist, or a value that makes no sense, is an error (exit status
# 64), and all errors are reported at once.
#
# Quantities are Kubernetes': 123Mi, 129M, 129e6, 1.5Gi, or a plain number. Times are written 500ms, 10s, 5m,
# 1h. A share of a GPU is a percentage, \"25%\".
";

/// `config.toml`: every key with its default and what it means.
#[must_use]
pub fn commented() -> String {
    let mut file = TOML_HEAD.to_owned();
    for section in Config::KEYS {
        let rows = rows(section);
        let header = header(&rows[0], section);
        if header.starts_with("[[") {
            let _ = writeln!(file, "\n{}\n#", comment(&section.doc.join("")));
            for row in rows {
                let text = format!("`{}`: {}. {}", row.key, row.accepts, row.doc);
                let _ = writeln!(file, "{}", comment(&text));
            }
            let lines =
                EXAMPLE.lines().map(|line| format!("# {line}").trim_end().to_owned() + "\n");
            let _ = write!(file, "\n{}", lines.collect::<String>());
            continue;
        }
        let _ = writeln!(file, "\n{}\n{header}", comment(&section.doc.join("")));
        let mut values = Vec::new();
        section.field.values(&Config::default(), section.name, section.takes, &mut values);
        for row in rows {
            let (doc, accepts) = (comment(&row.doc), comment(&format!("May be: {}", row.accepts)));
            let _ = writeln!(file, "{doc}\n{accepts}");
            let nested = format!("{}.", row.key);
            let own = values
                .iter()
                .filter(|shown| shown.key == row.key || shown.key.starts_with(&nested));
            for Shown { key, text, .. } in own {
                let _ = writeln!(file, "{} = {text}", &key[section.name.len() + 1..]);
            }
        }
    }
    file
}

/// Markdown as lines of a comment.
fn comment(markdown: &str) -> String {
    let mut lines = vec![String::from("#")];
    for word in plain(markdown).split_whitespace() {
        if lines.last().is_some_and(|line| line.len() + word.len() >= 110) {
            lines.push(String::from("#"));
        }
        if let Some(line) = lines.last_mut() {
            line.push(' ');
            line.push_str(word);
        }
    }
    lines.join("\n")
}

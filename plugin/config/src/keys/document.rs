//! The documents that follow from the declarations: the reference, as Markdown, and the commented file.

use std::fmt::Write;

use super::{Row, Shown, Takes};
use crate::Config;
use crate::table::{Key, Table, plain};
use crate::tables::EXAMPLE;

const HEAD: &str = "\
# Configuration

<!-- Written by `tessera config reference`; a test holds the two equal. -->

`tessera serve --config FILE` reads one TOML file. Without `--config` it reads `/etc/tessera/config.toml` where that
exists, else it uses the defaults. [config.toml](../config.toml) has every key with its default. A key that is left out
keeps its default; an unknown key or an impossible value is an error.

- `tessera config check FILE` reports every error, with line and key, also against this machine's GPUs, as soon as the
  file is sound TOML; `tessera config plan FILE` shows what it would change; `tessera config schema` prints a JSON Schema,
  which the chart's contains.
- A running plugin reads its file again when the file changes, on SIGHUP, and by `tessera config reload`. It refuses a
  bad file and keeps the [last good one](shares.md#changing-the-configuration), also over a restart.
- **A change takes effect at once**, for everybody, unless the meaning ends with *For new pods* (running ones keep what they
  have) or *After a restart* of the plugin, which running pods do not notice.
- **Quantities** are Kubernetes': `123Mi` or `123MiB`, `1.5Gi`, `129M`, `129e6`; **times** `500ms`, `10s`, `5m`, `1h`; a **share** of
  a GPU's time is `\"25%\"`, `\"250m\"` or `0.25` GPUs.
";

/// The whole page.
pub fn reference() -> String {
    let mut page = HEAD.to_owned();
    for section in &Config::keys() {
        let rows = rows(section);
        let header = header(&rows[0], section);
        // Writing to a string does not fail.
        let _ = write!(
            page,
            "\n## `{header}`\n\n{}\n\n| Key | May be | Default | Meaning |\n|---|---|---|---|\n",
            section.doc
        );
        for Row { key, accepts, default, required, takes, doc } in rows {
            let default = match (default, required) {
                (Some(text), _) => format!("`{text}`"),
                (None, true) => "required".to_owned(),
                (None, false) => "–".to_owned(),
            };
            let effect = match takes {
                Takes::AtOnce => "",
                Takes::NewPods => " *For new pods.*",
                Takes::Restart => " *After a restart.*",
            };
            let _ = writeln!(page, "| `{key}` | {accepts} | {default} | {doc}{effect} |");
        }
    }
    page
}

fn rows(section: &Key<Config>) -> Vec<Row> {
    let mut found = Vec::new();
    section.rows.into_iter().for_each(|rows| rows(section.name, &mut found));
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
# Tessera's configuration: every key with its default, as `tessera config default` prints it. A key that is left
# out keeps its default. An unknown key or an impossible value is an error (exit status 64); all errors are
# reported at once.
#
# Quantities are Kubernetes': 123Mi, 129M, 129e6, 1.5Gi, or a plain number. Times are written 500ms, 10s, 5m,
# 1h. A share of a GPU is a percentage, \"25%\".
";

/// `config.toml`: every key with its default and what it means.
pub fn commented() -> String {
    let mut file = TOML_HEAD.to_owned();
    for section in &Config::keys() {
        let rows = rows(section);
        let header = header(&rows[0], section);
        if header.starts_with("[[") {
            let _ = writeln!(file, "\n{}\n#", comment(section.doc));
            for row in rows {
                let text = format!("`{}`: {}. {}", row.key, row.accepts, row.doc);
                let _ = writeln!(file, "{}", comment(&text));
            }
            let lines =
                EXAMPLE.lines().map(|line| format!("# {line}").trim_end().to_owned() + "\n");
            let _ = write!(file, "\n{}", lines.collect::<String>());
            continue;
        }
        let _ = writeln!(file, "\n{}\n{header}", comment(section.doc));
        let mut values = Vec::new();
        (section.values)(&Config::default(), section.name, &mut values);
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

/// Markdown as the lines of a comment.
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

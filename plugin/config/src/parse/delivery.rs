//! `[container]`, `[driver]` and `[cdi]`.

use std::path::{Path, PathBuf};

use super::super::reader::{Report, Section};
use super::super::{Cdi, Config, Container, Driver, Mount, choices};
use super::{check_absolute, optional_path, set};
use tessera_model::cdi_name;

#[derive(Clone, Copy, PartialEq)]
enum Inject {
    File,
    Env,
}

pub(super) fn read(report: &mut Report<'_>, root: &mut Section<'_, '_>, config: &mut Config) {
    let mut section = root.section(report, "container");
    read_container(report, &mut section, &mut config.container);
    section.finish(report);
    let mut section = root.section(report, "driver");
    read_driver(report, &mut section, &mut config.driver);
    section.finish(report);
    let mut section = root.section(report, "cdi");
    read_cdi(report, &mut section, &mut config.cdi);
    section.finish(report);
}

fn read_container(report: &mut Report<'_>, section: &mut Section<'_, '_>, target: &mut Container) {
    let words = [("file", Inject::File), ("env", Inject::Env)];
    if let Some(inject) = section.choices(report, "inject", &words) {
        target.inject_file = inject.contains(&Inject::File);
        target.inject_env = inject.contains(&Inject::Env);
        if inject.is_empty() {
            let line = report.lines.get("container.inject").copied();
            let message = "without the shim no quota would hold; name \"file\", \"env\" or both";
            report.problem("container.inject", line, message);
        }
    }
    set(
        &mut target.device_list_strategy,
        section.choice(report, "device_list_strategy", &choices::STRATEGY),
    );
}

fn read_driver(report: &mut Report<'_>, section: &mut Section<'_, '_>, driver: &mut Driver) {
    if let Some(text) = section.string(report, "libraries") {
        driver.libraries = optional_path(report, "driver.libraries", text);
    }
    if let Some(text) = section.string(report, "root") {
        driver.root = optional_path(report, "driver.root", text);
    }
    if driver.root.is_some() && driver.libraries.is_some() {
        let line = report.lines.get("driver.root").copied();
        let message = "libraries are found below driver.root or lie in driver.libraries: set one";
        report.problem("driver.root", line, message);
    }
    if let Some(nodes) = section.strings(report, "device_nodes") {
        for node in &nodes {
            check_absolute(report, "driver.device_nodes", Path::new(node));
        }
        driver.device_nodes = nodes;
    }
    set(&mut driver.env, section.string_map(report, "env"));
    for name in driver.env.keys() {
        if name.is_empty() || name.contains(['=', '\0']) {
            let line = report.lines.get("driver.env").copied();
            report.problem("driver.env", line, format!("\"{name}\" cannot name a variable"));
        }
    }
    if let Some(sections) = section.sections(report, "mounts") {
        driver.mounts = sections.into_iter().filter_map(|s| read_mount(report, s)).collect();
    }
}

fn read_mount(report: &mut Report<'_>, mut section: Section<'_, '_>) -> Option<Mount> {
    let host = section.string(report, "host");
    let container = section.string(report, "container");
    let read_only = section.bool(report, "read_only").unwrap_or(true);
    section.finish(report);
    let line = report.lines.get("driver.mounts").copied();
    let (Some(host), Some(container)) = (host, container) else {
        report.problem("driver.mounts", line, "each mount needs `host` and `container`");
        return None;
    };
    let (host, container) = (PathBuf::from(host), PathBuf::from(container));
    check_absolute(report, "driver.mounts", &host);
    check_absolute(report, "driver.mounts", &container);
    if container.starts_with("/usr/local/tessera") || container == Path::new("/etc/ld.so.preload") {
        let message = format!("{} is Tessera's own; mount elsewhere", container.display());
        report.problem("driver.mounts", line, message);
    }
    Some(Mount { host, container, read_only })
}

fn read_cdi(report: &mut Report<'_>, section: &mut Section<'_, '_>, cdi: &mut Cdi) {
    if let Some(text) = section.string(report, "directory") {
        cdi.directory = PathBuf::from(text);
        check_absolute(report, "cdi.directory", &cdi.directory);
    }
    if let Some(kind) = section.string(report, "gpu_kind") {
        if !kind.is_empty()
            && let Err(error) = cdi_name::kind(&kind)
        {
            let line = report.lines.get("cdi.gpu_kind").copied();
            let message = format!("{error}; NVIDIA's is \"nvidia.com/gpu\"");
            report.problem("cdi.gpu_kind", line, message);
        }
        cdi.gpu_kind = Some(kind).filter(|kind| !kind.is_empty());
    }
    set(&mut cdi.gpu_names, section.choice(report, "gpu_names", &choices::GPU_NAMES));
}

//! Every function that NVIDIA's headers declare is hooked, unhooked with a reason, or inert.
//!
//! Headers of two CUDA generations come with the Python environment. A CUDA release that adds a way
//! to obtain memory or to launch fails here until somebody has looked at it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use tessera_cuda::coverage::{accounted_for, base_name, nvml_accounted_for};
use tessera_cuda::hooks::HOOKS;
use tessera_harness::external;

/// What the headers of this name say, of each CUDA generation.
fn texts(name: &str, test: &str) -> Option<Vec<String>> {
    let include = external::or_skip(external::headers(), test)?;
    let text = |dir: &PathBuf| std::fs::read(dir.join(name)).ok();
    let texts = include.iter().filter_map(text);
    Some(texts.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect())
}

/// The functions that headers with this `prefix` in their file name declare, as `MARK name(`.
fn declared(mark: &str, prefix: &str) -> Option<BTreeSet<String>> {
    let include = external::or_skip(external::headers(), "the coverage test")?;
    let is_header = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.ends_with(".h") && name.starts_with(prefix)
    };
    let files = include
        .iter()
        .flat_map(|dir| std::fs::read_dir(dir).expect("just found"))
        .map(|entry| entry.expect("readable").path())
        .filter(is_header);
    let mut names = BTreeSet::new();
    for file in files {
        let text = String::from_utf8_lossy(&std::fs::read(file).expect("readable")).into_owned();
        names.extend(declarations(&text, mark));
        names.extend(text.lines().filter_map(renamed));
    }
    Some(names)
}

/// The export that a header's macro puts in place of a declared name: `cuInit_v2` of
/// `#define cuInit cuInit_v2`, `cuInit_ptsz` of `#define cuInit __CUDA_API_PTSZ(cuInit)`.
fn renamed(line: &str) -> Option<String> {
    let mut words = line.trim().strip_prefix("#define")?.split_whitespace();
    let (name, target) = (words.next()?, words.next()?);
    if !is_driver_name(name) {
        return None;
    }
    for (macro_call, suffix) in [("__CUDA_API_PTSZ(", "_ptsz"), ("__CUDA_API_PTDS(", "_ptds")] {
        if let Some(inner) = target.strip_prefix(macro_call) {
            return Some(format!("{}{suffix}", inner.strip_suffix(')')?));
        }
    }
    let plain = target.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    (is_driver_name(target) && plain).then(|| target.to_owned())
}

/// `cuInit` of `CUresult CUDAAPI cuInit(`; function pointer types have a `(` or `*` in between.
fn declarations(text: &str, mark: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (at, _) in text.match_indices(mark) {
        let rest = text[at + mark.len()..].trim_start();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(0);
        if rest[end..].trim_start().starts_with('(') && rest.starts_with(|c: char| c.is_lowercase())
        {
            names.push(rest[..end].to_owned());
        }
    }
    names
}

#[test]
fn every_declared_driver_function_is_accounted_for() {
    let Some(names) = declared("CUDAAPI", "cuda") else { return };
    // A static inline function of cuda.h itself.
    let inline = "cuGetProcAddress_v2_ptsz";
    let drivers = names.iter().filter(|name| is_driver_name(name) && *name != inline);
    let drivers: Vec<_> = drivers.collect();
    assert!(
        drivers.len() > 500,
        "only {} functions found: has the headers' form changed?",
        drivers.len()
    );
    let unknown: Vec<_> = drivers.into_iter().filter(|name| !accounted_for(name)).collect();
    assert!(unknown.is_empty(), "neither hooked nor in proto/cuda/src/coverage.txt: {unknown:?}");
}

#[test]
fn every_hook_is_a_declared_function() {
    let Some(names) = declared("CUDAAPI", "cuda") else { return };
    let invented: Vec<_> =
        HOOKS.iter().map(|hook| hook.export).filter(|export| !names.contains(*export)).collect();
    assert!(invented.is_empty(), "hooked, but in no header: {invented:?}");
}

#[test]
fn every_declared_nvml_function_that_tells_about_tenants_is_accounted_for() {
    let Some(names) = declared("DECLDIR", "nvml") else { return };
    assert!(names.len() > 300, "only {} functions found", names.len());
    let unknown: Vec<_> = names.iter().filter(|name| !nvml_accounted_for(name)).collect();
    assert!(unknown.is_empty(), "neither hooked nor in proto/cuda/src/coverage.txt: {unknown:?}");
}

/// `cu[A-Z]…`: the driver's names; `cuda…` is the runtime's.
fn is_driver_name(name: &str) -> bool {
    name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
}

// The table's argument lists are those of NVIDIA's headers.
//
// A hook with a wrong signature corrupts its caller, and no compiler sees it: the names are bound at
// run time. cudaTypedefs.h has one function pointer type per export and version.

/// `PFN_…` without the prefix → the argument types in C, of every cudaTypedefs.h there is.
fn function_pointer_types() -> Option<Vec<BTreeMap<String, Vec<String>>>> {
    let headers = texts("cudaTypedefs.h", "the signature test")?;
    Some(headers.iter().map(|header| typedefs(header)).collect())
}

fn typedefs(header: &str) -> BTreeMap<String, Vec<String>> {
    let mut types = BTreeMap::new();
    for line in header.split(';') {
        // A comment may stand before it.
        let line = line.find("typedef CUresult").map_or("", |at| &line[at..]);
        let typedef = line.strip_prefix("typedef CUresult").map(str::trim_start);
        let Some(rest) = typedef.and_then(|t| t.strip_prefix("(CUDAAPI *PFN_")) else {
            continue;
        };
        let Some((name, arguments)) = rest.split_once(")(") else { continue };
        let arguments = arguments.trim_end_matches(')').split(',');
        let arguments = arguments.filter(|a| a.trim() != "void").map(rust_type).collect();
        types.insert(name.to_owned(), arguments);
    }
    types
}

/// `*mut c_void` of `void *p`: the type of a C parameter in the table's words.
fn rust_type(parameter: &str) -> String {
    let stars = parameter.matches('*').count();
    let words: Vec<&str> = parameter.split(|c: char| c.is_whitespace() || c == '*').collect();
    let mut words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    let constant = words.first() == Some(&"const");
    words.retain(|word| *word != "const");
    words.pop(); // the parameter's name
    let plain = match words.join(" ").as_str() {
        "unsigned int" => "c_uint".to_owned(),
        "unsigned char" => "c_uchar".to_owned(),
        "unsigned short" => "c_ushort".to_owned(),
        "int" => "c_int".to_owned(),
        "char" => "c_char".to_owned(),
        "void" => "c_void".to_owned(),
        "size_t" => "usize".to_owned(),
        "unsigned long long" => "c_ulonglong".to_owned(),
        // Struct versions that are current; earlier ones are types of their own.
        old @ ("CUdeviceptr_v1"
        | "CUDA_ARRAY_DESCRIPTOR_v1"
        | "CUDA_ARRAY3D_DESCRIPTOR_v1"
        | "CUDA_MEMCPY2D_v1"
        | "CUDA_MEMCPY3D_v1"
        | "CUDA_KERNEL_NODE_PARAMS_v1") => old.to_owned(),
        other => base_name(other).to_owned(),
    };
    let pointer = if constant { "*const " } else { "*mut " };
    match stars {
        0 => plain,
        _ => format!("{}{pointer}{plain}", "*mut ".repeat(stars - 1)),
    }
}

/// The types of `(name: type, …)` as the table has it.
fn table_types(arguments: &str) -> Vec<String> {
    let inner = arguments.trim().trim_start_matches('(').trim_end_matches(')');
    let arguments = inner.split(',').filter_map(|argument| argument.split_once(':'));
    // `stringify!` may space tokens as it likes.
    let tidy = |of: &str| of.split_whitespace().collect::<Vec<_>>().join(" ").replace("* ", "*");
    arguments.map(|(_, of)| tidy(of)).collect()
}

#[test]
fn every_hook_has_the_signature_of_its_header() {
    let Some(headers) = function_pointer_types() else { return };
    assert!(headers.len() >= 2, "two CUDA generations, not {}", headers.len());
    for row in HOOKS {
        let suffix = match row.flavour {
            "legacy" => String::new(),
            own => format!("_{own}"),
        };
        let name = format!("{}_v{}{suffix}", base_name(row.export), row.since);
        let declared: Vec<_> = headers.iter().filter_map(|types| types.get(&name)).collect();
        assert!(!declared.is_empty(), "{}: no header has PFN_{name}", row.export);
        for types in declared {
            assert_eq!(&table_types(row.arguments), types, "{} (PFN_{name})", row.export);
        }
    }
}

//! Every function that NVIDIA's headers declare is hooked, unhooked with a reason, or inert.
//!
//! Headers of two CUDA generations come with the Python environment. A CUDA release that adds a way
//! to obtain memory or to launch fails here until somebody has looked at it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use tessera_cuda::coverage::{accounted_for, base_name, inert, nvml_accounted_for};
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

/// A declaration in cuda.h with the comment before it.
#[derive(Debug)]
struct Documented {
    name: String,
    text: String,
    arguments: String,
}

/// Every documented function of cuda.h of both generations.
fn documented() -> Option<Vec<Documented>> {
    let headers = texts("cuda.h", "the classification test")?;
    Some(headers.iter().flat_map(|header| comments(header)).collect())
}

fn comments(header: &str) -> Vec<Documented> {
    let mut found = Vec::new();
    for (at, _) in header.match_indices("/**") {
        let Some(end) = header[at..].find("*/") else { continue };
        let (text, rest) = (&header[at..at + end], &header[at + end + 2..]);
        let rest = rest.trim_start();
        let Some(declaration) = rest.strip_prefix("CUresult CUDAAPI") else { continue };
        let Some((name, arguments)) = declaration.split_once('(') else { continue };
        found.push(Documented {
            name: name.trim().to_owned(),
            text: text.to_owned(),
            arguments: arguments.split(';').next().unwrap_or_default().to_owned(),
        });
    }
    found
}

/// Functions that look as if they obtained, released or launched something and do not, with why.
const HARMLESS: &[(&str, &str)] = &[
    ("cuMemAddressReserve", "address space, not memory"),
    ("cuMemAddressFree", "address space, not memory"),
    ("cuMemGetAllocationGranularity", "a question"),
    ("cuMemGetAllocationPropertiesFromHandle", "a question"),
    ("cuTensorMapSetAllocationClass", "a field of a descriptor"),
    ("cuMulticastAddDevice", "a member of an object; the memory comes with binding"),
    ("cuLogicalEndpointAddDevice", "a member of an object; the memory comes with binding"),
    ("cuLogicalEndpointExport", "a name; holds nothing"),
    ("cuLogicalEndpointIdRelease", "a number"),
    ("cuLogicalEndpointIdReserve", "a number"),
    ("cuGraphicsResourceSetMapFlags", "a flag of a resource"),
    ("cuGLSetBufferObjectMapFlags", "a flag of a resource"),
    ("cuImportExternalSemaphore", "a semaphore of another API"),
    ("cuDestroyExternalSemaphore", "a semaphore of another API"),
    ("cuLinkCreate", "linking is the host's work"),
    ("cuLinkAddData", "linking is the host's work"),
    ("cuLinkAddFile", "linking is the host's work"),
    ("cuLinkComplete", "linking is the host's work; loading the result is another call"),
    ("cuLinkDestroy", "linking is the host's work"),
    ("cuUserObjectCreate", "host objects that graphs own"),
    ("cuUserObjectRelease", "host objects that graphs own"),
    ("cuGraphReleaseUserObject", "host objects that graphs own"),
    ("cuTexRefCreate", "a descriptor of the host's"),
    ("cuTexRefDestroy", "a descriptor of the host's"),
    ("cuGraphCreate", "a graph is a description; its executable form obtains"),
    ("cuGraphDestroy", "a graph is a description"),
    ("cuGraphConditionalHandleCreate", "a number in a graph"),
    ("cuEventCreateFromEGLSync", "an event of another API"),
    ("cuIpcOpenEventHandle", "an event of another process"),
    ("cuGraphClone", "a graph is a description"),
    ("cuGraphRetainUserObject", "host objects that graphs own"),
    ("cuUserObjectRetain", "host objects that graphs own"),
    ("cuCtxResetPersistingL2Cache", "a cache"),
    ("cuKernelSetAttribute", "a setting, kept on the host"),
    ("cuKernelSetCacheConfig", "a setting, kept on the host"),
    ("cuStreamGetDevice", "a question"),
    ("cuStreamGetFlags", "a question"),
    ("cuStreamGetPriority", "a question"),
    ("cuModuleGetLoadingMode", "a question"),
    ("cuFuncIsLoaded", "a question"),
    ("cuDeviceGetNvSciSyncAttributes", "a question"),
    ("cuLogicalEndpointGetLimits", "a question"),
    ("cuLogicalEndpointQuery", "a question"),
    ("cuIpcGetEventHandle", "a name of an event"),
    ("cuTensorMapEncodeIm2col", "a descriptor of the host's"),
    ("cuTensorMapEncodeIm2colWide", "a descriptor of the host's"),
    ("cuTensorMapEncodeTiled", "a descriptor of the host's"),
    ("cuTensorMapReplaceAddress", "a descriptor of the host's"),
    ("cuCoredumpRegisterCompleteCallback", "a function of the host's"),
    ("cuCoredumpRegisterStartCallback", "a function of the host's"),
    ("cuDeviceRegisterAsyncNotification", "a function of the host's"),
    ("cuLogsRegisterCallback", "a function of the host's"),
];

/// Words of a name that say so.
const TELLING: &[&str] = &[
    "Alloc", "Create", "Import", "Map", "Launch", "Free", "Destroy", "Release", "Export", "Bind",
    "Trim", "Reset", "Memset", "Memcpy", "Retain", "Register", "Unload", "Load",
];
/// Types of what owns device memory.
const OWNERS: &[&str] = &[
    "CUarray *",
    "CUmipmappedArray *",
    "CUmemGenericAllocationHandle *",
    "CUmemoryPool *",
    "CUcontext *",
    "CUgreenCtx *",
    "CUmodule *",
    "CUlibrary *",
    "CUgraphExec *",
    "CUexternalMemory *",
    "CUdeviceptr *",
];

/// Functions that answer with such a handle and make nothing.
fn only_answers(name: &str) -> bool {
    // Whose handle it is was made before.
    let telling = name.contains("Get") || name.contains("CtxPop") || name.contains("Memset");
    telling && !TELLING.iter().any(|word| name.contains(word))
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

/// What the header itself says obtains memory, is not taken for harmless by oversight.
#[test]
fn nothing_that_the_headers_say_may_obtain_or_release_is_called_inert() {
    let Some(functions) = documented() else { return };
    assert!(functions.len() > 800, "only {} documented functions", functions.len());
    let mut wrong = BTreeSet::new();
    for Documented { name, text, arguments } in functions {
        let suspicious = [
            (text.contains("CUDA_ERROR_OUT_OF_MEMORY"), "may run out of memory"),
            (
                OWNERS.iter().any(|of| {
                    arguments.contains(of) && !arguments.contains(&format!("const {of}"))
                }) && !only_answers(&name),
                "gives out what owns memory",
            ),
            (TELLING.iter().any(|word| name.contains(word)), "is named so"),
        ];
        let Some((_, why)) = suspicious.into_iter().find(|(is, _)| *is) else { continue };
        let base = base_name(&name);
        // Nodes are parts of a description, whose executable form obtains; those that allocate are
        // accounted for.
        if base.starts_with("cuGraph") && base.contains("Node") {
            continue;
        }
        if inert().any(|name| name == base)
            && !HARMLESS.iter().any(|(harmless, _)| *harmless == base)
        {
            wrong.insert(format!("{name} ({why})"));
        }
    }
    assert!(wrong.is_empty(), "among the inert in proto/cuda/src/coverage.txt, but: {wrong:#?}");
}

#[test]
fn every_exception_is_needed() {
    for (name, why) in HARMLESS {
        assert!(inert().any(|inert| inert == *name) && !why.is_empty(), "{name} is not inert");
    }
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

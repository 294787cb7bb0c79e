//! The table's argument lists are those of NVIDIA's headers.
//!
//! A hook with a wrong signature corrupts its caller, and no compiler sees it: the names are bound at
//! run time. cudaTypedefs.h has one function pointer type per export and version.

use std::collections::BTreeMap;

use tessera_cuda::coverage::base_name;
use tessera_cuda::hooks::HOOKS;
use tessera_harness::external;

/// `PFN_…` without the prefix → the argument types in C, of every cudaTypedefs.h there is.
fn function_pointer_types() -> Option<Vec<BTreeMap<String, Vec<String>>>> {
    let include = match external::headers() {
        Ok(include) => include,
        Err(reason) => {
            external::skip("the signature test", &reason);
            return None;
        }
    };
    let headers = include.iter().filter_map(|dir| {
        let text = std::fs::read_to_string(dir.join("cudaTypedefs.h")).ok()?;
        Some(typedefs(&text))
    });
    Some(headers.collect())
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
fn c_parameters_are_read_as_the_tables_types() {
    assert_eq!(rust_type("void **kernelParams"), "*mut *mut c_void");
    assert_eq!(rust_type(" const char *symbol"), "*const c_char");
    assert_eq!(rust_type("unsigned int gridDimX"), "c_uint");
    assert_eq!(rust_type("CUdeviceptr_v2 *dptr"), "*mut CUdeviceptr");
    assert_eq!(rust_type("CUdeviceptr_v1 dptr"), "CUdeviceptr_v1");
    assert_eq!(table_types("(a: *mut *mut c_void, b: usize)"), ["*mut *mut c_void", "usize"]);
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

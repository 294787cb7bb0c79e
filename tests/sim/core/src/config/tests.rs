//! The configuration: defaults, the documented ones, and what is refused.

use super::*;

#[test]
fn defaults_are_two_gpus() {
    let c = Config::default();
    assert_eq!(c.gpus.len(), 2);
    assert_eq!(c.cuda_version, 13_000);
    assert_eq!(c.gpus[1].uuid_text(), "GPU-5e55e4a0-0000-4000-8000-000000000001");
    assert_eq!(c.gpus[0].pci_text(), "0000:17:00.0");
}

#[test]
fn the_documented_configurations_are_valid_and_the_first_is_the_default() {
    let text = include_str!("../../../../../docs/internals/simulator.md");
    let blocks: Vec<&str> =
        text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(Config::parse(blocks[0]).unwrap(), Config::default());
    assert_eq!(blocks.len(), 3);
    assert_eq!(Config::parse(blocks[1]).unwrap().units.len(), 4);
    let third = Config::parse(blocks[2]).unwrap();
    assert_eq!((third.kernels.len(), third.nvlinks.len()), (4, 1));
}

#[test]
fn unknown_key_is_named() {
    let e = Config::parse("tiem_slice = 1").unwrap_err();
    assert!(e.0.contains("tiem_slice"), "{e}");
}

#[test]
fn bad_values_are_refused() {
    for (text, part) in [
        ("[[gpu]]\nmemory = \"16 furlongs\"", "16 furlongs"),
        ("[[gpu]]\nuuid = \"GPU-1\"", "gpu 0: uuid"),
        ("[[gpu]]\npcie_switch = \"a\"\n[[gpu]]\npcie_switch = \"a\"\nnuma_node = 1", "on another"),
        ("[[gpu]]\nminor = 3\n[[gpu]]\nminor = 3", "unique"),
        ("cuda_version = \"9.0\"", "11.4"),
        ("[costs]\ntime_slice_us = -1.0", "out of range"),
        ("[costs]\ntime_slice_us = 0.1", "at least 10"),
        ("[[kernel]]\nname = \"k\"", "exactly one of"),
        ("[memory]\nreserved = \"1TiB\"", "not more than"),
        ("[memory]\nimports = \"none\"", r#""maker" or "both""#),
        ("[memory]\npool_chunk = \"3MiB\"", "a multiple of memory.granularity"),
    ] {
        let e = Config::parse(text).unwrap_err();
        assert!(e.0.contains(part), "{text:?} gave {e}");
    }
}

#[test]
fn first_matching_kernel_rule_counts() {
    let c = Config::parse(
        "[[kernel]]\nname = \"gemm_big\"\nus = 100.0\n[[kernel]]\nname = \"gemm*\"\nus_per_wave = 2.5\n\
         [[kernel]]\nname = \"spin\"\nparameter = 1",
    )
    .unwrap();
    assert_eq!(c.kernel_duration("gemm_big"), Duration::Fixed(100_000));
    assert_eq!(c.kernel_duration("gemm_small"), Duration::PerWave(2_500));
    assert_eq!(c.kernel_duration("spin"), Duration::Parameter(1));
    assert_eq!(c.kernel_duration("other"), Duration::Fixed(10_000));
}

#[test]
fn the_driver_keeps_of_a_gpu_as_much_as_its_product_says() {
    let c = Config::parse("[[gpu]]\n[[gpu]]\nname = \"NVIDIA L4\"\n[[gpu]]\nname = \"A\"");
    let c = c.unwrap();
    let kept = |c: &Config| [0, 1, 2].map(|i| (c.memory_of(i).0 - c.memory_of(i).1) / MIB);
    assert_eq!(kept(&c), [700, 556, 551]);
    let said = "[memory]\nreserved = \"256MiB\"\n[[gpu]]\n[[gpu]]\n[[gpu]]";
    assert_eq!(kept(&Config::parse(said).unwrap()), [256; 3]);
}

#[test]
fn contexts_may_follow_the_gpu() {
    let of = |overhead: &str| {
        let c = Config::parse(&format!(
            "[memory]\ncontext_overhead = {overhead}\n[[gpu]]\nsm_count = 58\n\
             compute_capability = \"8.9\"\n[[gpu]]"
        ))
        .unwrap();
        [c.context_bytes(&c.gpus[0]), c.context_bytes(&c.gpus[1])]
    };
    assert_eq!(of("\"auto\""), [174 * MIB, 462 * MIB]);
    assert_eq!(of("\"64MiB\""), [64 * MIB; 2]);
}

#[test]
fn uuid_round_trips() {
    let c = Config::default();
    assert_eq!(parse_uuid(&c.gpus[0].uuid_text()), Some(c.gpus[0].uuid));
    assert_eq!(parse_uuid("GPU-zzzzzzzz-0000-4000-8000-000000000001"), None);
}

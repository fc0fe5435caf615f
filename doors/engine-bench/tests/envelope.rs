//! The envelope of `engine-bench --json` follows the schema of `bifolio bench`, and the page of
//! `bench --report` has a card for it.

use std::process::Command;

use bifolio_report::{Report, Row, page};
use serde_json::Value;

/// Runs a benchmark, and checks the envelope that it prints. Returns it.
#[track_caller]
fn checked(command: &mut Command) -> Report {
    let schema: Value =
        serde_json::from_str(include_str!("../../../docs/bench.schema.json")).unwrap();
    let schema = jsonschema::draft202012::new(&schema).unwrap();
    let output = command.args(["--smoke", "--json", "-"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let envelope: Value = serde_json::from_slice(&output.stdout).unwrap();
    let violations: Vec<String> = schema
        .iter_errors(&envelope)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(violations.is_empty(), "{violations:#?}");
    let report: Report = serde_json::from_value(envelope).unwrap();
    report
}

/// Checks that the page of `bench --report` has a card for the benchmark.
#[track_caller]
fn check_card(report: &Report) {
    let card = format!("<article><h3>{}</h3>", report.bench);
    assert!(page(std::slice::from_ref(report), 0).contains(&card));
}

#[test]
fn the_envelope_of_an_engine_follows_the_schema() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engine-bench"));
    let report = checked(command.arg("redb"));
    assert_eq!(report.bench, "redb");
    check_card(&report);
}

/// The works that open databases of their own, with all series.
#[test]
fn the_envelope_of_sqlite_has_its_works_and_series() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engine-bench"));
    let works = ["import", "index", "pool", "open"];
    command.args(["sqlite", "--data", "fits", "--work", &works.join(",")]);
    let report = checked(&mut command);
    let found: Vec<String> = report.rows.iter().map(|row| row.case.text("work")).collect();
    assert_eq!(found, works);
    // Only ours run where memory cannot be bounded by control groups.
    let all = ["bifolio", "bifolio_exclusive", "default", "default_mmap"];
    let expected = if report.skipped.is_empty() { &all[..] } else { &all[..2] };
    for row in &report.rows {
        let series: Vec<&str> = row.series.keys().map(AsRef::as_ref).collect();
        assert_eq!(series, expected, "{row:?}");
    }
}

/// `cargo x check-doors objects --whole` builds the program, which takes long.
#[test]
#[ignore = "builds DataFusion"]
fn the_envelope_of_objects_follows_the_schema() {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    command.args(["x", "engine-bench", "objects"]);
    let report = checked(&mut command);
    assert_eq!(report.bench, "objects");
    check_card(&report);
    let of = |row: &Row| [row.case.text("work"), row.case.text("percentile"), row.unit.to_string()];
    let found: Vec<_> = report.rows.iter().map(of).collect();
    let kinds = ["64 KiB", "8 KiB", "64 KiB, hot", "64 KiB, restarted"];
    let runs = ["first run", "second run", "killed, restarted"];
    let reads = kinds.iter().flat_map(|kind| ["50", "99", "99.9"].map(|at| [*kind, at, "ns/read"]));
    let times = runs.iter().chain(&kinds).map(|phase| [*phase, "", "CPU s"]);
    let all = runs.map(|run| [run, "", "queries/s"]).into_iter().chain(reads).chain(times);
    let all: Vec<_> = all.chain([["resident", "", "MiB"]]).collect();
    assert_eq!(found, all);
    for row in &report.rows {
        let series: Vec<&str> = row.series.keys().map(AsRef::as_ref).collect();
        assert_eq!(series, ["alone", "bifolio", "foyer", "foyer-direct"]);
        assert!(row.repetitions.values().all(|turns| turns.len() == 2), "{row:?}");
    }
    assert!(report.verified_bytes > 0);
}

#[cfg(feature = "rivals")]
#[test]
fn the_envelope_of_hit_ratio_has_rivals() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engine-bench"));
    let report = checked(command.arg("hit-ratio"));
    let rivals = ["foyer_lfu", "foyer_s3_fifo", "quick_cache"];
    // The others have no classes with floors.
    let of_tenant = |row: &&Row| row.case.text("trace") == "tenant_beside_a_scan";
    for row in report.rows.iter().filter(|row| !of_tenant(row)) {
        for name in rivals {
            // No policy misses less than the one that knows the future.
            assert!(row.series[name] >= row.series["belady"], "{name}: {row:?}");
        }
    }
}

#[cfg(feature = "rivals")]
#[test]
fn the_envelope_of_pools_has_every_rival() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engine-bench"));
    let report = checked(command.arg("pools"));
    check_card(&report);
    let all = ["bifolio", "foyer", "mmap", "moka", "quick_cache", "redb"];
    let expected = if report.skipped.is_empty() { &all[..] } else { &all[..1] };
    for row in &report.rows {
        let series: Vec<&str> = row.series.keys().map(AsRef::as_ref).collect();
        assert_eq!(series, expected, "{row:?}");
    }
}

//! The envelope of `engine-bench --json` follows the schema of `bifolio bench`, and the page of
//! `bench --report` has a card for it.

use std::process::Command;

use bifolio_report::{Report, page};
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
    let card = format!("<article><h3>{}</h3>", report.bench);
    assert!(page(std::slice::from_ref(&report), 0).contains(&card));
    report
}

#[test]
fn the_envelope_of_an_engine_follows_the_schema() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engine-bench"));
    assert_eq!(checked(command.arg("redb")).bench, "redb");
}

/// `cargo x check-doors objects --whole` has built the program, which takes half an hour.
#[test]
#[ignore = "builds DataFusion"]
fn the_envelope_of_objects_follows_the_schema() {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    command.args(["x", "engine-bench", "objects"]);
    let report = checked(&mut command);
    assert_eq!(report.bench, "objects");
    let works: Vec<String> = report.rows.iter().map(|row| row.case.text("work")).collect();
    assert_eq!(works, ["first run", "second run", "64 KiB, p50", "64 KiB, p99"]);
    for row in &report.rows {
        let series: Vec<&str> = row.series.keys().map(AsRef::as_ref).collect();
        assert_eq!(series, ["alone", "bifolio", "foyer", "foyer-direct"]);
        assert!(row.repetitions.values().all(|turns| turns.len() == 2), "{row:?}");
    }
    assert!(report.verified_bytes > 0);
}

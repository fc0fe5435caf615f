//! The envelope of `engine-bench --json` follows the schema of `bifolio bench`.

use std::process::Command;

use serde_json::Value;

#[test]
fn the_envelope_of_an_engine_follows_the_schema() {
    let schema: Value =
        serde_json::from_str(include_str!("../../../docs/bench.schema.json")).unwrap();
    let schema = jsonschema::draft202012::new(&schema).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_engine-bench"));
    let output = command.args(["redb", "--smoke", "--json", "-"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let envelope: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(envelope["bench"], "redb");
    let violations: Vec<String> = schema
        .iter_errors(&envelope)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(violations.is_empty(), "{violations:#?}");
}

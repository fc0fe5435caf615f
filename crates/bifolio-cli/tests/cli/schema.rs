//! The JSON schema of envelopes, `docs/bench.schema.json`, and what is validated against it.

use std::sync::LazyLock;

use jsonschema::Validator;
use serde_json::{Value, json};

static SCHEMA: LazyLock<Validator> = LazyLock::new(|| {
    let schema = include_str!("../../../../docs/bench.schema.json");
    jsonschema::draft202012::new(&serde_json::from_str(schema).unwrap()).unwrap()
});

/// Fails with every violation and its place.
pub fn assert_valid(envelope: &Value) {
    let violations: Vec<String> = SCHEMA
        .iter_errors(envelope)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(violations.is_empty(), "{}: {violations:#?}", envelope["bench"]);
}

#[test]
fn the_schema_refuses_what_is_no_envelope() {
    let row = json!({"case": {}, "unit": "ops/s", "series": {}, "spread": {}, "counts": {}});
    for wrong in [json!({}), json!({"schema": 2}), json!({"rows": [row]}), json!([])] {
        assert!(!SCHEMA.is_valid(&wrong), "{wrong}");
    }
}

#[test]
fn the_recorded_report_is_valid() {
    let recorded = include_str!("../../../../docs/report.json");
    let envelopes: Vec<Value> =
        recorded.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!envelopes.is_empty());
    envelopes.iter().for_each(assert_valid);
}

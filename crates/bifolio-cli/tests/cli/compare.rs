//! `bifolio compare`: what it prints, and its exit status.

use std::fs;

use crate::support::{error_line, run};

/// A run of six rows, one of them at `rate`.
fn envelope(rate: f64) -> String {
    let row = |threads: usize| {
        let rate = if threads == 0 { rate } else { 1000.0 };
        let rates = [rate, rate * 1.001, rate * 0.999];
        format!(
            r#"{{"case":{{"threads":{threads}}},"unit":"ops/s","series":{{"pin":{rate}}},
            "repetitions":{{"pin":{rates:?}}}}}"#
        )
        .replace('\n', "")
    };
    let rows: Vec<_> = (0..6).map(row).collect();
    format!(r#"{{"schema":1,"bench":"x","host":{{}},"config":{{}},"rows":[{}]}}"#, rows.join(","))
}

#[test]
fn the_exit_status_says_whether_a_row_is_worse() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let before = file("before.json", &envelope(1000.0));
    let slower = file("slower.json", &envelope(500.0));
    let broken = file("broken.json", "{}");

    let same = run(&["compare", &before, &before]);
    assert_eq!(same.status.code(), Some(0));
    assert!(String::from_utf8(same.stdout).unwrap().starts_with("no change\n"));

    let worse = run(&["compare", &before, &slower]);
    assert_eq!(worse.status.code(), Some(1));
    assert!(String::from_utf8(worse.stdout.clone()).unwrap().contains("worse"));
    assert!(error_line(&worse).contains("worse beyond noise: 1"));
    assert_eq!(run(&["compare", &slower, &before]).status.code(), Some(0), "better is not worse");
    assert_eq!(run(&["compare", &before, &slower, "--at-least", "150"]).status.code(), Some(0));

    let refused = run(&["compare", &before, &broken]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(error_line(&refused).contains("broken.json, line 1"));
}

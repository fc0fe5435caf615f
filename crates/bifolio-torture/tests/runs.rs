//! Runs of the program that must fail: a scene that hangs, in each of its parts, a run without any
//! work, and a device that does not flush.

use std::process::{Command, Output};

fn torture(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bifolio-torture"));
    command.args(line.split_whitespace()).output().expect("the program starts")
}

/// Runs a scene that hangs in `phase`, and checks the report.
fn check_hang(phase: &str, class: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bifolio-torture"));
    command.args(["--seed", "6", "--scene-ms", "50", "--hang-seconds", "5", "--only", class]);
    let output = command.args(["--stall", phase]).output().expect("the program starts");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{told}");
    let named = format!("torture: class {class}, seed 6: hangs in {phase}: no progress for 5s");
    assert!(told.contains(&named), "{phase}: {told}");
    assert!(told.contains("bifolio_torture::watchdog::enter"), "no stack: {told}");
    assert!(told.contains(&format!("again: cargo x torture --only {class} --seed 6")), "{told}");
}

#[test]
fn a_hang_is_reported_in_each_part_of_a_scene() {
    let phases = [
        "the setup",
        "the calls",
        "the last read",
        "the last sync",
        "the close of the files",
        "the close of the cache",
        "the drop of the cache",
    ];
    std::thread::scope(|scope| {
        for phase in phases {
            scope.spawn(move || check_hang(phase, "steady"));
        }
        for class in ["exerciser", "upsets", "gates", "drops"] {
            scope.spawn(move || check_hang("the work", class));
        }
    });
}

#[test]
fn a_run_without_any_work_fails() {
    let output = torture("--seconds 0");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && told.contains("nothing was done"), "{told}");
}

#[test]
fn a_run_with_work_succeeds() {
    let output = torture("--seconds 1 --scene-ms 100 --only steady,upsets --seed 6");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains(" calls a second: clean"), "{told}");
}

#[test]
fn a_device_that_forgets_flushes_is_found() {
    let line = "--only power-files --seed 2 --seconds 60 --cuts";
    let output = torture(&format!("{line} 2"));
    let told = String::from_utf8_lossy(&output.stdout);
    if told.contains("needs root, /dev/fuse and mkfs") {
        return bifolio_testing::skip("power-disk", told);
    }
    assert!(output.status.success() && told.contains("2 power cuts, 2 of them"), "{told}");
    let output = torture(&format!("{line} 60 --forget-flushes"));
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && told.contains("\nsession "), "{told}");
}

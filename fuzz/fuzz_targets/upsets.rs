//! Looks for bytes that make a case of one thread and one file fail whose storage fails at the n-th
//! call (`bifolio_testing::UpsetCase`). `cargo x fuzz`, or `cargo +nightly fuzz run upsets`.
#![no_main]

use bifolio_testing::UpsetCase;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let case = UpsetCase::from_bytes(bytes);
    if let Err(problem) = case.check() {
        panic!("{problem}\n{case:#?}");
    }
});

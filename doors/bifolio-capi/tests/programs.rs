//! The C programs of `tests/c` and the C++ example, compiled and run: with the shared library, with
//! the static one, and with the address sanitizer where the compiler has it.
//!
//! A machine without a C compiler skips them and says so; `BIFOLIO_TEST_REQUIRE=all` forbids that.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const PROGRAMS: [&str; 7] = ["abi", "files", "later", "misuse", "pins", "threads", "tls"];
/// Libraries of the system that the static library needs.
const SYSTEM_LIBRARIES: [&str; 5] = ["-lgcc_s", "-lutil", "-lpthread", "-lm", "-ldl"];

#[derive(Clone, Copy, PartialEq)]
enum Linking {
    Shared,
    Static,
    Sanitized,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The folder that this test's own libraries are in.
fn libraries() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// The static library, whose name may have a hash: the newest.
fn static_library() -> PathBuf {
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with("libbifolio_capi") && name.ends_with(".a")
    };
    let files = std::fs::read_dir(libraries()).unwrap().map(|entry| entry.unwrap().path());
    let modified = |path: &PathBuf| path.metadata().unwrap().modified().unwrap();
    files.filter(is_ours).max_by_key(modified).expect("a static library beside the test")
}

fn succeeded(command: &mut Command, what: &str) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(
        output.status.success(),
        "{what}: {}\n{command:?}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Returns `true` if `compiler` can compile a program with `flag`; otherwise the test is skipped
/// with a message.
fn can_compile(compiler: &str, flag: Option<&str>) -> bool {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("empty.c");
    std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let mut command = Command::new(compiler);
    command.args(flag).arg(&source).arg("-o").arg(directory.path().join("empty"));
    let can = command.output().is_ok_and(|output| output.status.success());
    let is_required = std::env::var("BIFOLIO_TEST_REQUIRE").is_ok_and(|which| which == "all");
    assert!(can || !is_required, "{compiler} {flag:?} does not work here");
    if !can {
        println!("skipped: {compiler} {flag:?} does not work here");
    }
    can
}

/// Compiles a program; `directory` gets the program and the name of the library for the loader.
fn compile(compiler: &str, source: &Path, linking: Linking, directory: &Path) -> PathBuf {
    let program = directory.join(source.file_stem().unwrap());
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror", "-g", "-O1", "-pthread"]);
    command.arg("-I").arg(folder().join("include")).arg(source).arg("-o").arg(&program);
    match linking {
        Linking::Static => {
            command.arg(static_library()).args(SYSTEM_LIBRARIES);
        }
        Linking::Shared | Linking::Sanitized => {
            let name = concat!(
                "libbifolio.so.",
                env!("CARGO_PKG_VERSION_MAJOR"),
                ".",
                env!("CARGO_PKG_VERSION_MINOR")
            );
            let target = libraries().join("libbifolio_capi.so");
            std::os::unix::fs::symlink(&target, directory.join(name)).unwrap();
            command.arg(directory.join(name)).arg("-Wl,-rpath").arg("-Wl,$ORIGIN");
        }
    }
    if linking == Linking::Sanitized {
        command.arg("-fsanitize=address,undefined").arg("-fno-sanitize-recover=all");
    }
    succeeded(&mut command, "the compiler");
    program
}

fn run_all(linking: Linking) {
    for name in PROGRAMS {
        let directory = tempfile::tempdir().unwrap();
        let source = folder().join("tests/c").join(name).with_extension("c");
        let program = compile("cc", &source, linking, directory.path());
        let files = directory.path().join("files of the test");
        std::fs::create_dir(&files).unwrap();
        let mut command = Command::new(program);
        command.arg(files);
        // The library handles faults of maps.
        command.env("ASAN_OPTIONS", "handle_sigbus=0:allow_user_segv_handler=1:detect_leaks=1");
        let output = succeeded(&mut command, name);
        print!("{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn c_programs_run_with_the_shared_library() {
    if can_compile("cc", None) {
        run_all(Linking::Shared);
    }
}

#[test]
fn c_programs_run_with_the_static_library() {
    if can_compile("cc", None) {
        run_all(Linking::Static);
    }
}

#[test]
fn c_programs_run_under_the_address_sanitizer() {
    if can_compile("cc", Some("-fsanitize=address,undefined")) {
        run_all(Linking::Sanitized);
    }
}

#[test]
fn the_program_of_the_document_compiles_and_runs() {
    if !can_compile("cc", None) {
        return;
    }
    let document = std::fs::read_to_string(folder().join("../../docs/c.md")).unwrap();
    let (_, program) = document.split_once("```c\n").unwrap();
    let (program, _) = program.split_once("```").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("document.c");
    std::fs::write(&source, program).unwrap();
    let program = compile("cc", &source, Linking::Shared, directory.path());
    let output = succeeded(Command::new(program).current_dir(&directory), "the program");
    assert_eq!(output.stdout, b"leaves\n");
}

#[test]
fn the_cpp_example_finds_every_key() {
    if !can_compile("c++", None) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = folder().join("examples/btree.cpp");
    let program = compile("c++", &source, Linking::Shared, directory.path());
    let tree = directory.path().join("tree");
    let output = succeeded(Command::new(program).arg(tree).arg("200000"), "the example");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("200000 keys"), "{text}");
}

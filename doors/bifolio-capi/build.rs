//! Names the shared library for the loader, and keeps it loaded: its threads run its code.

fn main() {
    let major = std::env::var("CARGO_PKG_VERSION_MAJOR").expect("cargo sets the version");
    let minor = std::env::var("CARGO_PKG_VERSION_MINOR").expect("cargo sets the version");
    // Before 1.0 a minor version may change the interface.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libbifolio.so.{major}.{minor}");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}

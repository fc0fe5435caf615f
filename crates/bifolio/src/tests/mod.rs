//! Tests of protocols: model runs under loom, and exhaustive searches.

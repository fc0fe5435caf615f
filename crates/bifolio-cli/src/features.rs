//! `bifolio features`: what the kernel offers, what is in use, and why not.

use bifolio::FeatureReport;
use comfy_table::{ContentArrangement, Table, presets};

use crate::output;

/// Prints one line for each probe.
pub(crate) fn run() -> anyhow::Result<()> {
    output::print(&format!("{}\n", table(&bifolio::features())))
}

fn table(features: &[FeatureReport]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_BORDERS_ONLY)
        .set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["feature", "available", "in use", "fallback", "why"]);
    for feature in features {
        table.add_row([
            feature.name.to_string(),
            yes_or_no(feature.available),
            yes_or_no(feature.in_use),
            feature.fallback.to_string(),
            feature.reason.to_string(),
        ]);
    }
    table
}

fn yes_or_no(truth: bool) -> String {
    if truth { "yes" } else { "no" }.to_owned()
}

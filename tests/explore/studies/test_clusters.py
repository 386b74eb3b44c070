"""Rows of clusters: the cheapest that serves is marked."""

from nearflash.explore.studies.clusters import cluster_serving_rows, cluster_training_rows
from nearflash.explore.systems.cluster import Cluster
from nearflash.explore.systems.instinfer import Serving

CLUSTERS = [Cluster(hosts, 4, 16) for hosts in (1, 2)]


def test_the_cheapest_token_that_serves_is_the_best():
    rows = cluster_serving_rows(Serving("llama3.1-70b", 2_000, 500, 64), CLUSTERS, rate=1.0)
    assert [(row["hosts"], row["layout"]) for row in rows[:3]] == [
        (1, "GPU memory"), (1, "host memory"), (1, "drives")]  # fmt: skip
    (best,) = [row for row in rows if row["best"]]
    assert best["serves"] and best["usd_per_million"] == min(row["usd_per_million"] for row in rows if row["serves"])
    assert all(row["tokens_per_user_second"] >= 1 and row["fits"] for row in rows if row["serves"])


def test_nothing_is_best_where_nothing_serves():
    rows = cluster_serving_rows(Serving("llama3.1-70b", 2_000, 500, 64), CLUSTERS, rate=1e6)
    assert rows and not any(row["best"] or row["serves"] for row in rows)


def test_long_contexts_are_served_by_drives_alone():
    rows = cluster_serving_rows(Serving("llama3.1-70b", 32_000, 500, 100), [Cluster(2, 4, 16)], rate=0.5)
    assert [row["layout"] for row in rows if row["serves"]] == ["drives"]


def test_without_drives_there_are_no_rows_of_them():
    plain = [Cluster(1, 8, 0)]
    assert {row["layout"] for row in cluster_serving_rows(Serving(), plain)} == {"GPU memory", "host memory"}
    assert {row["layout"] for row in cluster_training_rows("llama3.1-8b", plain)} == {"GPU memory", "host memory"}


def test_training_marks_the_cheapest_that_fits():
    (best,) = [row for row in cluster_training_rows("llama3.1-8b", [Cluster(1)]) if row["best"]]
    assert best["layout"] == "GPU memory"

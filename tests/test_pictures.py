"""Pictures of predictions and of training curves."""

import json

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, Metadata
from helpers.figures import check_texts
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from sw_detectron.analysis.drawing import STATISTIC_COLORS
from sw_detectron.data import generate_shapes, register_shapes
from sw_detectron.report import curves
from sw_detectron.report.curves import plot_training_curves, training_curves_figure
from sw_detectron.tasks.detection import drawing
from sw_detectron.tasks.detection.drawing import (
    draw_predictions,
    overlay_results,
    predictions_figure,
)

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
ITERATIONS = range(19, 300, 20)
WINNERS = {"mean": "ln", "cov": "bw"}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Records of `shapes_val`, for once a split of four images only."""
    root = tmp_path_factory.mktemp("shapes")
    generate_shapes(root, "val", 4)
    register_shapes(root)
    yield DatasetCatalog.get("shapes_val")
    register_shapes()


@pytest.fixture
def predictions(records):
    """The ground truth, as results in COCO's format."""
    results = []
    for record in records:
        for annotation in record["annotations"]:
            size = record["height"], record["width"]
            mask = mask_util.merge(mask_util.frPyObjects(annotation["segmentation"], *size))
            results.append(
                {
                    "image_id": record["image_id"],
                    "category_id": annotation["category_id"] + 1,
                    "bbox": annotation["bbox"],
                    "score": 0.9,
                    "segmentation": mask | {"counts": mask["counts"].decode()},
                }
            )
    return results


def panels(figure: Figure) -> list[np.ndarray]:
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes]


def write_metrics(path, layers=(), moments=("mean", "cov"), tail=""):
    """Write records with a falling loss, and ratios that move from equal to a single winner."""
    with open(path, "w") as file:
        for iteration in ITERATIONS:
            progress = iteration / ITERATIONS[-1]
            record = {"iteration": iteration, "lr": 0.02, "total_loss": 2.0 - progress}
            record |= {"loss_cls": 1.0 - progress / 2, "loss_box_reg": 1.0 - progress / 2}
            for layer in layers:
                for moment in moments:
                    for statistic in STATISTIC_COLORS:
                        target = float(statistic == WINNERS[moment])
                        ratio = (1 - progress) / len(STATISTIC_COLORS) + progress * target
                        record[f"sw/{layer}/{moment}/{statistic}"] = ratio
            file.write(json.dumps(record) + "\n")
        file.write(tail)
    return path


def layer_names(count: int) -> list[str]:
    return [
        f"model.backbone.bottom_up.layers.res{2 + i // 12}.{i % 12}.conv2" for i in range(count)
    ]


@pytest.mark.parametrize("num_images, expected", [(1, 1), (3, 3), (6, 4)])
def test_every_image_has_two_panels(predictions, num_images, expected):
    figure = predictions_figure("shapes_val", predictions, num_images)
    titles = [axes.get_title() for axes in figure.axes]
    assert len(titles) == 2 * expected
    assert all("ground truth" in title for title in titles[::2])
    assert all("prediction" in title for title in titles[1::2])
    assert all(panel.shape == (512, 512, 3) for panel in panels(figure))


def test_predictions_are_drawn_where_they_are(predictions):
    first = [p for p in predictions if p["image_id"] == 1][:1]
    blank = panels(predictions_figure("shapes_val", [], num_images=2))
    drawn = panels(predictions_figure("shapes_val", first, num_images=2))
    # Ground truths, and the prediction of the second image, are the same in both pictures.
    assert [np.array_equal(a, b) for a, b in zip(blank, drawn, strict=True)] == [
        True,
        False,
        True,
        True,
    ]
    changed = (blank[1] != drawn[1]).any(axis=-1)
    x, y, width, height = (round(4 * value) for value in first[0]["bbox"])
    mask = np.kron(mask_util.decode(first[0]["segmentation"]), np.ones((4, 4))) > 0
    assert changed[mask].mean() > 0.9
    margin = 60  # px, for the label
    changed[max(0, y - margin) : y + height + margin, max(0, x - margin) : x + width + margin] = 0
    assert not changed.any()


def test_predictions_below_the_threshold_are_left_out(predictions):
    blank = panels(predictions_figure("shapes_val", [], num_images=1))
    strict = panels(predictions_figure("shapes_val", predictions, 1, score_threshold=0.91))
    loose = panels(predictions_figure("shapes_val", predictions, 1, score_threshold=0.9))
    assert np.array_equal(strict[1], blank[1])
    assert not np.array_equal(loose[1], blank[1])


def test_categories_are_named_as_in_the_ground_truth(records, predictions):
    metadata = drawing.MetadataCatalog.get("shapes_val")
    truths = [annotation for record in records for annotation in record["annotations"]]
    for truth, prediction in zip(truths, predictions, strict=True):
        name = metadata.thing_classes[truth["category_id"]]
        assert drawing._label(truth, metadata) == name
        converted = drawing._to_annotation(prediction, metadata)
        assert drawing._label(converted, metadata) == f"{name} 90%"


def test_predictions_without_masks_show_their_boxes(predictions):
    boxes = [{k: v for k, v in p.items() if k != "segmentation"} for p in predictions]
    with_boxes = panels(predictions_figure("shapes_val", boxes, num_images=1))[1]
    blank = panels(predictions_figure("shapes_val", [], num_images=1))[1]
    assert not np.array_equal(with_boxes, blank)


def test_colours_tell_the_objects_of_a_single_class_apart():
    black = np.zeros((600, 600, 3), np.uint8)
    objects = [
        {"category_id": 0, "score": 1.0, "bbox": [x, 100, 200, 200]}
        | {"segmentation": [[x, 100, x + 200, 100, x + 200, 300, x, 300]]}
        for x in (50, 350)
    ]
    inside = [(200, 150), (200, 450)]
    colours = {}
    for classes in (["cell"], ["cell", "other"]):
        metadata = Metadata(name="", thing_classes=classes)
        picture = overlay_results(black, objects, metadata)
        colours[len(classes)] = [tuple(picture[place] // 32) for place in inside]
    assert colours[1][0] != colours[1][1]
    assert colours[2][0] == colours[2][1]


def test_a_file_of_predictions_gives_a_png(predictions, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(predictions))
    output = tmp_path / "new" / "predictions.png"
    assert draw_predictions("shapes_val", tmp_path / "results.json", output, 2) is None
    assert output.read_bytes().startswith(PNG_SIGNATURE)
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize("content", [None, "", "[{", '{"bbox": []}'])
def test_a_wrong_file_of_predictions_is_named(records, tmp_path, content):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="Cannot read predictions from .*results.json"):
        predictions_figure("shapes_val", path)


def test_predictions_that_do_not_fit_are_refused(predictions):
    with pytest.raises(ValueError, match="no category of id 5"):
        predictions_figure("shapes_val", [predictions[0] | {"category_id": 5}])
    with pytest.raises(ValueError, match="No image"):
        predictions_figure("shapes_val", predictions, num_images=0)


@pytest.mark.parametrize("count", [0, 1, 4, 7, 50])
def test_every_layer_has_a_panel(tmp_path, count):
    names = layer_names(count)
    figure = training_curves_figure(write_metrics(tmp_path / "metrics.json", names))
    total, components, *ratios = figure.axes
    assert total.get_title() == "Total loss"
    assert [line.get_label() for line in components.lines] == ["loss_box_reg", "loss_cls"]
    assert len(ratios) == count
    for axes, name in zip(ratios, names, strict=True):  # the order of the network, not 0, 1, 10
        assert name.endswith(axes.get_title().lstrip("…"))
        assert len(axes.lines) == 2 * len(STATISTIC_COLORS)


def test_curves_show_the_recorded_values(tmp_path):
    figure = training_curves_figure(write_metrics(tmp_path / "metrics.json", ["res3.0.conv2"]))
    recorded, smoothed = figure.axes[0].lines
    assert list(recorded.get_xdata()) == list(ITERATIONS)
    assert recorded.get_ydata()[-1] == pytest.approx(1.0)
    assert smoothed.get_ydata()[1:-1] == pytest.approx(recorded.get_ydata()[1:-1])  # it is linear
    lasts = {
        (to_hex(line.get_color()).upper(), line.get_linestyle()): line.get_ydata()[-1]
        for line in figure.axes[2].lines
    }
    assert lasts == {
        (color, style): pytest.approx(float(statistic == WINNERS[moment]))
        for statistic, color in STATISTIC_COLORS.items()
        for moment, style in (("cov", "-"), ("mean", "--"))
    }


def test_the_legend_names_only_what_is_shown(tmp_path):
    path = write_metrics(tmp_path / "metrics.json", ["stem"], moments=["cov"])
    (legend,) = training_curves_figure(path).subfigs[1].legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [*STATISTIC_COLORS, "covariance"]


def test_statistics_have_colours_of_their_own():
    assert list(STATISTIC_COLORS) == ["bw", "iw", "bn", "in", "ln"]
    assert len(set(STATISTIC_COLORS.values())) == len(STATISTIC_COLORS)


def test_a_line_cut_short_is_skipped_and_a_repeated_iteration_counts_once(tmp_path):
    tail = '{"iteration": 299, "total_loss": 5.0}\n{"iteration": 319, "total_l'
    figure = training_curves_figure(write_metrics(tmp_path / "metrics.json", tail=tail))
    recorded = figure.axes[0].lines[0]
    assert list(recorded.get_xdata()) == list(ITERATIONS)
    assert recorded.get_ydata()[-1] == 5.0


def test_smoothing_averages_and_leaves_gaps_out():
    assert curves._smooth(np.array([4.0])) == pytest.approx([4.0])
    assert curves._smooth(np.array([0.0, 3.0, 6.0, 0.0])) == pytest.approx([1.5, 3.0, 3.0, 3.0])
    for gap in (np.nan, np.inf, -np.inf):
        assert curves._smooth(np.array([1.0, gap, 3.0])) == pytest.approx([1.0, 2.0, 3.0])
    assert len(curves._smooth(np.arange(1000.0))) == 1000


@pytest.mark.parametrize("content", [None, "", "not json\n", "[1, 2]\n", '{"lr": 1}\n'])
def test_a_file_without_records_is_named(tmp_path, content):
    path = tmp_path / "metrics.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="Cannot read metrics from .*metrics.json") as error:
        plot_training_curves(path, tmp_path / "curves.png")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("count", [0, 1, 4, 7, 20])
def test_no_text_overlaps_or_leaves_the_picture(tmp_path, count):
    figure = training_curves_figure(write_metrics(tmp_path / "metrics.json", layer_names(count)))
    assert check_texts(figure) > 2 * (count + 2)


def test_a_failed_write_keeps_the_old_picture(tmp_path, monkeypatch):
    metrics, output = write_metrics(tmp_path / "metrics.json"), tmp_path / "curves.png"
    assert plot_training_curves(metrics, output) is None
    before = output.read_bytes()
    assert before.startswith(PNG_SIGNATURE)

    def write_half(self, path, **_):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", write_half)
    with pytest.raises(OSError, match="No space"):
        plot_training_curves(metrics, output)
    assert output.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [output, metrics]

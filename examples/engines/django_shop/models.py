"""What the project stores."""

from django.db import models


class Product(models.Model):
    """A product that takes part in the promotion."""

    sku = models.CharField(max_length=64, unique=True)
